"""llama.cpp through llama-cpp-python's low-level API: model, vocabulary, context, sequences, state bytes, samplers.

The only module that imports llama_cpp. Every sequence id is checked here, because llama.cpp aborts or wipes the whole
context on a wrong one (ENGINE.md §5), and state bytes are only ever put into the transfer sequence. All calls of a
Context belong to one thread; a Vocabulary may be used from any. It knows nothing of slots, requests or the pipe.
"""

from __future__ import annotations

import ctypes
import secrets
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import llama_cpp.llama_cpp as api
import numpy as np
from numpy.typing import NDArray

from strata.engine.layout import Layout, discover_layout
from strata.engine.values import ContextShape, Sampling
from strata.errors import ModelError
from strata.types import Tokens

STATE_VERSION = (int(api.LLAMA_STATE_SEQ_MAGIC), int(api.LLAMA_STATE_SEQ_VERSION))
MAX_SEQUENCES = 256
UBATCH = 520
"""Rows of one pass over the weights: a chunk of 512 and the rows of eight slots."""
PENALTY_WINDOW = 64  # tokens the repetition penalties look back on, as in llama-server

KV_TYPES: dict[str, int] = {
    "f32": api.GGML_TYPE_F32,
    "f16": api.GGML_TYPE_F16,
    "bf16": 30,  # has no name in llama-cpp-python
    "q8_0": api.GGML_TYPE_Q8_0,
    "q5_1": api.GGML_TYPE_Q5_1,
    "q5_0": api.GGML_TYPE_Q5_0,
    "q4_1": api.GGML_TYPE_Q4_1,
    "q4_0": api.GGML_TYPE_Q4_0,
    "iq4_nl": api.GGML_TYPE_IQ4_NL,
}
UNQUANTISED = frozenset({"f32", "f16", "bf16"})

_LOG_ERROR = 4
_LAYOUT_PREFIXES = (b"llama_kv_cache: ", b"llama_memory_recurrent")
_BytePointer = ctypes.POINTER(ctypes.c_uint8)
_Abort = api.ggml_abort_callback
_NONE = -1  # a sequence that does not exist


# ------------------------------------------------------------------------------------------------------------------ log


class _Log:
    """What llama.cpp logs, as far as it is needed: the cache layout of the last context, and the last errors."""

    def __init__(self) -> None:
        self.layout: list[str] = []
        self.errors: deque[str] = deque(maxlen=6)
        self._callback = api.llama_log_callback(self._take)  # kept: llama.cpp holds only a pointer to it
        api.llama_log_set(self._callback, None)
        api.llama_backend_init()

    def _take(self, level: int, text: bytes, _data: object) -> None:
        if level == _LOG_ERROR:
            self.errors.append(text.decode(errors="replace").strip())
        elif text.startswith(_LAYOUT_PREFIXES):
            self.layout.append(text.decode(errors="replace"))


_log = _Log()


def last_errors() -> str:
    """The error lines llama.cpp logged since the last call, in one line."""
    lines = [line for line in _log.errors if line]
    _log.errors.clear()
    return "; ".join(lines)


# ---------------------------------------------------------------------------------------------------- model, vocabulary


class Model:
    """A loaded model. `progress` is called with the loaded fraction; `layer_split` is for its devices, if there are."""

    def __init__(
        self, path: Path, *, gpu_layers: int | None, layer_split: Sequence[float], progress: Callable[[float], None]
    ) -> None:
        def report(fraction: float, _data: object) -> bool:
            progress(fraction)
            return True

        params = api.llama_model_default_params()
        params.progress_callback = api.llama_progress_callback(report)  # which `params` keeps alive
        if gpu_layers is not None:
            params.n_gpu_layers = gpu_layers
        if layer_split:
            params.tensor_split = (ctypes.c_float * max(len(layer_split), api.llama_max_devices()))(*layer_split)
        last_errors()
        self.pointer = api.llama_model_load_from_file(str(path).encode(), params)
        if not self.pointer:
            reason = last_errors() or "no reason given"
            raise ModelError(
                f"llama.cpp cannot load {path}: {reason}. The file is damaged or of a kind this llama.cpp does not "
                "know; fetch it again or choose another with --model.",
                field="--model",
            )
        self.vocabulary = Vocabulary(api.llama_model_get_vocab(self.pointer))
        self.n_layers = int(api.llama_model_n_layer(self.pointer))
        self.context_train = int(api.llama_model_n_ctx_train(self.pointer))
        self.is_recurrent = bool(api.llama_model_is_recurrent(self.pointer))
        self.is_hybrid = bool(api.llama_model_is_hybrid(self.pointer))
        self.has_devices = bool(api.llama_supports_gpu_offload())
        self.sliding_window = int(api.llama_model_n_swa(self.pointer))

    def metadata(self, key: str) -> str | None:
        """A GGUF metadata value as text, or None."""
        size = int(api.llama_model_meta_val_str(self.pointer, key.encode(), None, 0))
        if size < 0:
            return None
        buffer = ctypes.create_string_buffer(size + 1)
        api.llama_model_meta_val_str(self.pointer, key.encode(), buffer, len(buffer))
        return buffer.value.decode(errors="replace")

    def chat_template(self) -> str | None:
        """The chat template stored in the GGUF, or None."""
        text: bytes | None = api.llama_model_chat_template(self.pointer, None)
        return text.decode(errors="replace") if text else None


class Vocabulary:
    """Text to tokens and back. Immutable: safe on every thread."""

    def __init__(self, pointer: object) -> None:
        self._pointer = pointer
        self.n_tokens = int(api.llama_vocab_n_tokens(pointer))
        self.bos = int(api.llama_vocab_bos(pointer))
        self.eos = int(api.llama_vocab_eos(pointer))
        self.adds_bos = bool(api.llama_vocab_get_add_bos(pointer)) and self.bos >= 0
        self.end_of_generation = frozenset(t for t in range(self.n_tokens) if api.llama_vocab_is_eog(pointer, t))
        self._pieces: dict[int, bytes] = {}

    def text_of(self, token: int) -> str:
        """How a token is written in the vocabulary; empty for ids outside it (-1: a model without that token)."""
        if not 0 <= token < self.n_tokens:
            return ""
        return bytes(api.llama_vocab_get_text(self._pointer, token)).decode(errors="replace")

    def is_marker(self, token: int) -> bool:
        """Whether a token is a control or user-defined one."""
        marker = api.LLAMA_TOKEN_ATTR_CONTROL | api.LLAMA_TOKEN_ATTR_USER_DEFINED
        return bool(api.llama_vocab_get_attr(self._pointer, token) & marker)

    def specials(self) -> dict[int, bytes]:
        """Every token that is recognised wherever a text writes it, and how it is written."""
        special = api.LLAMA_TOKEN_ATTR_CONTROL | api.LLAMA_TOKEN_ATTR_USER_DEFINED | api.LLAMA_TOKEN_ATTR_UNKNOWN
        found = (t for t in range(self.n_tokens) if api.llama_vocab_get_attr(self._pointer, t) & special)
        return {token: api.llama_vocab_get_text(self._pointer, token) for token in found}

    def tokenize(self, text: str | bytes) -> Tokens:
        """Token ids of `text`; special tokens written in it are recognised. No BOS is added."""
        data = text if isinstance(text, bytes) else text.encode(errors="replace")
        tokens = np.empty(len(data) + 8, np.int32)
        for _ in range(2):
            pointer = tokens.ctypes.data_as(api.llama_token_p)
            n = int(api.llama_tokenize(self._pointer, data, len(data), pointer, len(tokens), False, True))
            if n >= 0:
                return tokens[:n].copy()
            tokens = np.empty(-n, np.int32)
        raise ValueError(f"llama.cpp could not tokenise {len(data)} bytes of text")

    def detokenize(self, tokens: Tokens) -> str:
        """Text of `tokens`, special tokens included. Raises ValueError for ids outside the vocabulary."""
        if len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) >= self.n_tokens):
            raise ValueError(f"token ids must lie in [0, {self.n_tokens})")
        ids = np.ascontiguousarray(tokens, np.int32)
        buffer = ctypes.create_string_buffer(16 * len(ids) + 64)
        for _ in range(2):
            pointer = ids.ctypes.data_as(api.llama_token_p)
            n = int(api.llama_detokenize(self._pointer, pointer, len(ids), buffer, len(buffer), False, True))
            if n >= 0:
                return buffer.raw[:n].decode(errors="replace")
            buffer = ctypes.create_string_buffer(-n)
        raise ValueError(f"llama.cpp could not detokenise {len(ids)} tokens")

    def piece(self, token: int) -> bytes:
        """The bytes a generated token adds to the text; control tokens add none. For the engine thread only."""
        if token not in self._pieces:
            n = -64
            while n < 0:  # the room it takes
                buffer = ctypes.create_string_buffer(-n)
                n = int(api.llama_token_to_piece(self._pointer, token, buffer, len(buffer), 0, False))
            self._pieces[token] = buffer.raw[:n]
        return self._pieces[token]


# -------------------------------------------------------------------------------------------------------------- context


class Context:
    """One llama_context, its K/V pool shared by all sequences or split into a stream for each. Owned by one thread.

    A step fills `token`, `position`, `sequence` and `want` (logits wanted: 0 or 1) up to some row and calls `decode`.
    """

    def __init__(self, model: Model, shape: ContextShape) -> None:
        if not 2 <= shape.sequences <= MAX_SEQUENCES:
            raise ValueError(f"{shape.sequences} sequences; llama.cpp takes at most {MAX_SEQUENCES}")
        self.model, self.shape = model, shape
        self.streams = 1 if shape.unified else shape.sequences
        self.transfer = shape.sequences - 1 if shape.unified else _NONE
        self.empty = shape.sequences - 2 if shape.unified else _NONE
        """A sequence that never holds anything (with at least one more for a slot)."""
        params = api.llama_context_default_params()
        params.n_ctx = shape.cells
        params.n_batch = shape.batch
        params.n_ubatch = min(UBATCH, shape.batch)
        params.n_seq_max = shape.sequences
        params.n_threads = params.n_threads_batch = shape.threads
        params.flash_attn_type = int(shape.flash_attention)
        params.type_k, params.type_v = KV_TYPES[shape.kv_k], KV_TYPES[shape.kv_v]
        params.kv_unified = shape.unified
        params.swa_full = shape.swa_full
        _log.layout.clear()
        last_errors()
        self._pointer = api.llama_init_from_model(model.pointer, params)
        if not self._pointer:
            raise ModelError(
                f"llama.cpp cannot create a context of {shape.cells} tokens: {last_errors() or 'out of memory?'}. "
                "Try a smaller --context or --parallel, or another --kv.",
                field="--context",
            )
        self.layout: Layout = discover_layout(_log.layout)
        self.cells = int(api.llama_n_ctx(self._pointer))
        self.cells_per_sequence = int(api.llama_n_ctx_seq(self._pointer))
        self._memory = api.llama_get_memory(self._pointer)
        self.ubatch = int(api.llama_n_ubatch(self._pointer))
        """Rows of one pass over the weights."""
        self._make_batch(shape.batch)
        self._arm_abort()

    def _make_batch(self, rows: int) -> None:
        """A llama_batch whose arrays are numpy views; each row's sequence ids point into one flat array."""
        self._batch = api.llama_batch_init(rows, 0, 1)
        view = np.ctypeslib.as_array
        self.token: NDArray[np.int32] = view(self._batch.token, (rows,))
        self.position: NDArray[np.int32] = view(self._batch.pos, (rows,))
        self.want: NDArray[np.int8] = view(self._batch.logits, (rows,))
        self.sequence: NDArray[np.int32] = np.zeros(rows, np.int32)
        view(self._batch.n_seq_id, (rows,))[:] = 1
        pointers = view(ctypes.cast(self._batch.seq_id, ctypes.POINTER(ctypes.c_uint64)), (rows,))
        self._sequence_pointers, self._own_pointers = pointers, pointers.copy()
        pointers[:] = self.sequence.ctypes.data + 4 * np.arange(rows, dtype=np.uint64)

    def _arm_abort(self) -> None:
        """Let `stop` be what llama.cpp asks between the operations of a decode whether to abort.

        The callback is libc's strlen on two bytes, "" or "\\x01": true when `stop` is set. A Python callback would cost
        the GIL at every operation. Only the CPU backend asks; the steps of others are short.
        """
        self.stop: NDArray[np.uint8] = np.zeros(2, np.uint8)
        """Set the first byte, from any thread, to end the decode that runs. Whoever sets it has it cleared again."""
        strlen = ctypes.cast((ctypes.cdll.msvcrt if sys.platform == "win32" else ctypes.CDLL(None)).strlen, _Abort)
        api.llama_set_abort_callback(self._pointer, strlen, ctypes.c_void_p(self.stop.ctypes.data))

    def close(self) -> None:
        self._sequence_pointers[:] = self._own_pointers  # llama_batch_free frees what they point to
        api.llama_batch_free(self._batch)
        api.llama_free(self._pointer)

    def decode(self, rows: int) -> int:
        """Run the first `rows` rows of the batch; 0, or llama_decode's code.

        1: no free cells, nothing changed. 2: stopped; llama.cpp took back the part of the batch that it was computing,
        which attention memory survives and recurrent memory does not.
        """
        if not 0 < rows <= len(self.token):
            raise ValueError(f"{rows} rows in a batch of {len(self.token)}")
        self._batch.n_tokens = rows
        return int(api.llama_decode(self._pointer, self._batch))

    def feed(self, sequence: int, tokens: Sequence[int] | Tokens, start: int) -> None:
        """Decode `tokens` at positions from `start` in one batch, with logits of the last. Raises ModelError."""
        n = len(tokens)
        self.token[:n] = tokens
        self.position[:n] = np.arange(start, start + n)
        self.sequence[:n] = self._checked(sequence)
        self.want[:n] = 0
        self.want[n - 1] = 1
        code = self.decode(n)
        if code:
            raise ModelError(f"llama.cpp cannot decode with this model (code {code}): {last_errors()}", field="--model")

    # -------------------------------------------------------------------------------------------------------- sequences

    def _checked(self, sequence: int) -> int:
        if not 0 <= sequence < self.shape.sequences:
            raise ValueError(f"sequence {sequence} outside [0, {self.shape.sequences})")
        return sequence

    def last_position(self, sequence: int) -> int:
        """The highest position a sequence holds; -1 when it is empty."""
        return int(api.llama_memory_seq_pos_max(self._memory, self._checked(sequence)))

    def first_position(self, sequence: int) -> int:
        """The lowest position a sequence holds in all its caches that slide; -1 when it is empty."""
        return int(api.llama_memory_seq_pos_min(self._memory, self._checked(sequence)))

    def remove(self, sequence: int, start: int = 0, end: int = -1) -> bool:
        """Drop positions [start, end), -1 = all; False when this memory cannot be cut there (nothing changed then)."""
        return bool(api.llama_memory_seq_rm(self._memory, self._checked(sequence), start if start > 0 else -1, end))

    def share(self, source: int, target: int, start: int, end: int) -> None:
        """Let `target` hold positions [start, end) of `source` too. Recurrent state is shared as a whole."""
        if self.streams > 1:  # llama.cpp would abort
            raise ValueError("the sequences of a split pool share nothing")
        api.llama_memory_seq_cp(self._memory, self._checked(source), self._checked(target), start, end)

    def clear(self) -> None:
        """Empty every sequence."""
        api.llama_memory_clear(self._memory, False)

    # ------------------------------------------------------------------------------------------------------ state bytes

    def state_size(self, sequence: int, *, checkpoint: bool = False) -> int:
        return int(api.llama_state_seq_get_size_ext(self._pointer, self._checked(sequence), int(checkpoint)))

    def state(self, sequence: int, *, checkpoint: bool = False) -> NDArray[np.uint8]:
        """The state of a sequence in memory of its own; for probes and checkpoints, not for blocks."""
        blob = np.empty(self.state_size(sequence, checkpoint=checkpoint), np.uint8)
        return blob[: self.state_get(sequence, blob, checkpoint=checkpoint)]

    def state_get(self, sequence: int, into: NDArray[np.uint8], *, checkpoint: bool = False) -> int:
        """Copy the state of a sequence; bytes written, 0 when `into` is too small.

        `checkpoint`: only what cannot be cut (LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY, which is 1).
        """
        pointer, flags = into.ctypes.data_as(_BytePointer), int(checkpoint)
        return int(api.llama_state_seq_get_data_ext(self._pointer, pointer, len(into), self._checked(sequence), flags))

    def state_set(self, data: NDArray[np.uint8], into: int | None = None, *, checkpoint: bool = False) -> bool:
        """Put a state into the transfer sequence; False when it was refused (it may hold parts of it then).

        Straight `into` a slot goes what sharing on would lose (a checkpoint), and everything in a split pool.
        """
        pointer, target = data.ctypes.data_as(_BytePointer), self._checked(self.transfer if into is None else into)
        taken = api.llama_state_seq_set_data_ext(self._pointer, pointer, len(data), target, int(checkpoint))
        return int(taken) == len(data)

    def sample(self, sampler: Sampler, row: int) -> int:
        """The next token after batch row `row`, whose logits were wanted."""
        if sampler.is_greedy:  # llama.cpp would first copy all logits into a list of candidates
            logits = api.llama_get_logits_ith(self._pointer, row)
            return int(np.ctypeslib.as_array(logits, (self.model.vocabulary.n_tokens,)).argmax())
        return int(api.llama_sampler_sample(sampler.pointer, self._pointer, row))


# -------------------------------------------------------------------------------------------------------------- sampler


class Sampler:
    """One request's sampler chain. `recent`: the tokens before the first sampled one, for the penalties."""

    def __init__(self, vocabulary: Vocabulary, sampling: Sampling, recent: Tokens) -> None:
        self.pointer = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        stages = self._stages(vocabulary, sampling)
        for stage in stages:
            api.llama_sampler_chain_add(self.pointer, stage)
        self.is_greedy = sampling.temperature <= 0 and len(stages) == 1
        for token in recent[-PENALTY_WINDOW:]:
            api.llama_sampler_accept(self.pointer, int(token))

    @staticmethod
    def _stages(vocabulary: Vocabulary, s: Sampling) -> list[object]:
        """llama-server's order: bias, penalties, top-k, top-p, min-p, temperature, draw."""
        stages: list[object] = []
        bias = [(token, value) for token, value in s.logit_bias.items() if 0 <= token < vocabulary.n_tokens]
        if bias:
            array = (api.llama_logit_bias * len(bias))(*(api.llama_logit_bias(*pair) for pair in bias))
            stages.append(api.llama_sampler_init_logit_bias(vocabulary.n_tokens, len(bias), array))
        penalties = (s.repeat_penalty, s.frequency_penalty, s.presence_penalty)
        if penalties != (1.0, 0.0, 0.0):
            stages.append(api.llama_sampler_init_penalties(vocabulary.n_tokens, PENALTY_WINDOW, *penalties))
        if s.temperature <= 0:
            return [*stages, api.llama_sampler_init_greedy()]
        if s.top_k > 0:
            stages.append(api.llama_sampler_init_top_k(s.top_k))
        if s.top_p < 1:
            stages.append(api.llama_sampler_init_top_p(s.top_p, 1))
        if s.min_p > 0:
            stages.append(api.llama_sampler_init_min_p(s.min_p, 1))
        seed = secrets.randbits(32) if s.seed is None else s.seed
        # 2^32 - 1 would ask llama.cpp for a seed of its own
        drawn = api.llama_sampler_init_dist(seed % 0xFFFFFFFF)
        return [*stages, api.llama_sampler_init_temp(s.temperature), drawn]

    def close(self) -> None:
        api.llama_sampler_free(self.pointer)
