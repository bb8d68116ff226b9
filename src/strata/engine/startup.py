"""From settings to a served model: checks, flash attention, context size, self-test, identity.

Everything here runs once, on the engine thread, before Ready. It raises ModelError or ConfigError with the flag at
fault; what a served model then does is `loop.py`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import psutil

from strata.engine.checkpoints import Checkpoints
from strata.engine.fingerprint import StateFacts, fingerprint
from strata.engine.gguf import GgufFile, read_model
from strata.engine.layout import BadState, recognise, token_bytes
from strata.engine.llama import KV_TYPES, MAX_SEQUENCES, STATE_VERSION, Context, Model
from strata.engine.measure import FlashChoice, choose_flash_attention, measure_idle_cell
from strata.engine.pool_choice import UNIFIED_OPAQUE, PoolChoice, choose_pool
from strata.engine.selftest import Proof, is_cuttable, self_test
from strata.engine.slots import Slots
from strata.engine.streams import slots_of
from strata.engine.template import ChatTemplate, find_openers
from strata.engine.values import ContextShape, EngineInfo, EngineSettings, Remembered
from strata.errors import ConfigError
from strata.rules.stages import MOST_PARTS, LayerRange, layer_ranges

MARGIN_CELLS = 512
"""Pool cells beyond slots x context: room for a block in the transfer sequence."""
_RESERVED_SEQUENCES = 2  # the transfer sequence, and one that stays empty (ENGINE.md §0.5)
_MORE_SPARES_THAN_SLOTS = 2  # each slot can have a checkpoint that waits for its capture, and one more each time
_POOL_SHARE = 4  # the default pool takes at most this fraction of the RAM
_PROBE_BATCH = 64
_CONTEXT_STEP = 256
_TIMED_TOKENS = 32

ProgressCallback = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model ready to serve."""

    info: EngineInfo
    model: Model
    context: Context
    slots: Slots
    checkpoints: Checkpoints | None  # None where none are needed, or none can be taken
    template: ChatTemplate
    settings: EngineSettings
    token_s: float  # seconds per token of a short read, measured at start


def load(settings: EngineSettings, remembered: Remembered, progress: ProgressCallback) -> Served:
    """Load the model of `settings`. Raises ModelError or ConfigError."""
    began = time.perf_counter()
    _check(settings)
    files = read_model(Path(settings.model_path))
    model = Model(
        Path(settings.model_path),
        gpu_layers=settings.gpu_layers,
        layer_split=settings.layer_split,
        progress=lambda done: progress("model", done),
    )
    stages = _stage_ranges(settings, model)
    threads = settings.threads or default_threads()
    progress("measuring", 0.0)
    flash = choose_flash_attention(model, settings, threads, remembered.flash_attention)
    progress("context", 0.0)
    tokens = settings.context or _default_context(model, settings, threads, flash)
    room = min(settings.slots * tokens, settings.pool_cells or settings.slots * tokens)
    tokens = min(tokens, room)
    progress("measuring", 0.5)
    pool = choose_pool(model, settings, _shape(settings, threads, flash, cells=tokens), remembered.split_pool)
    progress("self-test", 0.0)
    context, proof, pool = _proved(settings, model, threads, flash, stages, pool, tokens=tokens, room=room)
    slots = slots_of(
        context,
        settings.slots,
        tokens,
        cuttable=is_cuttable(model),
        window=proof.cut_window,
        format=proof.format,
        stages=proof.stages,
    )
    checkpoints = _checkpoints(settings, context, slots, proof)
    template = ChatTemplate(
        model.chat_template(),
        bos=model.vocabulary.text_of(model.vocabulary.bos),
        eos=model.vocabulary.text_of(model.vocabulary.eos),
    )
    info = _describe(settings, model, slots, context, proof, flash, files, room_cells=room)
    info = msgspec.structs.replace(
        info,
        openers=_openers(settings.turn_token, model, template),
        has_chat_template=template.is_from_model,
        checkpoint_bytes=checkpoints.most_bytes if checkpoints else 0,
        spare_checkpoints=_spares(settings) if checkpoints else 0,
        pool="split" if pool.split else "unified",
        pool_reason=pool.reason,
        idle_cell_s=measure_idle_cell(context) if _can_measure_idle_cells(settings, slots, pool) else None,
        load_s=time.perf_counter() - began,
    )
    return Served(
        info=info,
        model=model,
        context=context,
        slots=slots,
        checkpoints=checkpoints,
        template=template,
        settings=settings,
        token_s=_time_a_token(context),
    )


def _proved(
    settings: EngineSettings,
    model: Model,
    threads: int,
    flash: FlashChoice,
    stages: Sequence[LayerRange],
    pool: PoolChoice,
    *,
    tokens: int,
    room: int,
) -> tuple[Context, Proof, PoolChoice]:
    """The context, how its memory is kept, and the pool that it has at last: whole images need a unified one."""
    if pool.split:
        cells = settings.slots * -(-tokens // _CONTEXT_STEP) * _CONTEXT_STEP
        context = Context(model, _shape(settings, threads, flash, cells=cells, unified=False))
        proof = self_test(model, context, stages)
        if proof.mode != "opaque":
            return context, proof, pool
        context.close()
        pool = UNIFIED_OPAQUE
    context = Context(model, _shape(settings, threads, flash, cells=_pool_cells(model, settings, room)))
    return context, self_test(model, context, stages), pool


def _can_measure_idle_cells(settings: EngineSettings, slots: Slots, pool: PoolChoice) -> bool:
    return settings.measure_idle_cells and slots.has_rows and not pool.split


def _describe(
    settings: EngineSettings,
    model: Model,
    slots: Slots,
    context: Context,
    proof: Proof,
    flash: FlashChoice,
    files: Sequence[GgufFile],
    *,
    room_cells: int,
) -> EngineInfo:
    """What is known of the model and its memory; the rest is still empty."""
    kv = settings.kv_k if settings.kv_k == settings.kv_v else f"{settings.kv_k},{settings.kv_v}"
    return EngineInfo(
        model_name=model.metadata("general.name") or Path(settings.model_path).stem,
        model_path=settings.model_path,
        fingerprint=fingerprint(files, _facts(model, context, proof, files)),
        slots=settings.slots,
        context=slots.limit,
        context_train=model.context_train,
        pool_cells=context.cells,
        room_cells=room_cells,
        vocab_tokens=model.vocabulary.n_tokens,
        kv=kv,
        flash_attention=flash.on,
        flash_attention_reason=flash.reason,
        threads=context.shape.threads,
        mode=proof.mode,
        mode_reason=proof.reason,
        head_room=proof.head_room,
        block_tokens=proof.format.block_tokens if proof.format else 0,
        stages=proof.stages,
        openers=(),
        has_chat_template=False,
        load_s=0.0,
        cuttable=proof.mode == "segments",
        row_layers=proof.format.layers if proof.format else (),
    )


def _checkpoints(settings: EngineSettings, context: Context, slots: Slots, proof: Proof) -> Checkpoints | None:
    if proof.checkpoint is None:
        return None
    spares = range(len(slots.held), len(slots.held) + _spares(settings))
    return Checkpoints(context, slots, proof.checkpoint, spares=spares, head_room=proof.head_room)


def _spares(settings: EngineSettings) -> int:
    """Sequence ids for checkpoints that wait. They cost nothing but, in recurrent memory, a state each."""
    wanted = settings.spare_checkpoints
    if wanted is None:
        wanted = settings.slots + _MORE_SPARES_THAN_SLOTS
    return min(wanted, MAX_SEQUENCES - _RESERVED_SEQUENCES - settings.slots)


def _pool_cells(model: Model, settings: EngineSettings, room: int) -> int:
    """Cells for what the slots may hold, a block on its way, and what checkpoints that wait may keep alive."""
    return room + MARGIN_CELLS + _spares(settings) * max(0, model.sliding_window)


def _time_a_token(context: Context) -> float:
    """Seconds per token of a short read. Leaves the context empty."""
    began = time.perf_counter()
    context.feed(0, [0] * _TIMED_TOKENS, 0)
    seconds = time.perf_counter() - began
    context.clear()
    return seconds / _TIMED_TOKENS


def _check(settings: EngineSettings) -> None:
    most_slots = MAX_SEQUENCES - _RESERVED_SEQUENCES
    if not 1 <= settings.slots <= most_slots:
        raise ConfigError(f"--parallel {settings.slots} must lie in 1..{most_slots}.", field="--parallel")
    if settings.context is not None and settings.context < 1:
        raise ConfigError(f"--context {settings.context} must be at least 1.", field="--context")
    if settings.pool not in ("auto", "unified", "split"):
        raise ConfigError(f"--pool {settings.pool} must be auto, unified or split.", field="--pool")
    if settings.pool == "split" and settings.pool_cells is not None:
        raise ConfigError("--pool split has cells for every slot; remove --pool-cells.", field="--pool")
    if settings.pool_cells is not None and settings.pool_cells < 1:
        raise ConfigError(f"--pool-cells {settings.pool_cells} must be at least 1.", field="--pool-cells")
    if settings.read_chunk < 1:
        raise ConfigError(f"a read chunk of {settings.read_chunk} tokens must be at least 1.", field="read_chunk")
    if settings.spare_checkpoints is not None and settings.spare_checkpoints < 1:
        raise ConfigError("there must be at least one spare checkpoint.", field="spare_checkpoints")
    split = settings.layer_split
    if len(split) > MOST_PARTS or any(not 0 <= share < math.inf for share in split) or (split and not sum(split)):
        raise ConfigError(
            f"--layer-split must be at most {MOST_PARTS} numbers from 0, not all of them 0.", field="--layer-split"
        )
    if settings.decode_share is not None and not 0 <= settings.decode_share < 1:
        raise ConfigError(
            f"STRATA_BATCH_DECODE_SHARE {settings.decode_share} must lie in [0, 1).", field="STRATA_BATCH_DECODE_SHARE"
        )
    if settings.flash_attention not in ("auto", "on", "off"):
        raise ConfigError(
            f"--flash-attention {settings.flash_attention} must be auto, on or off.", field="--flash-attention"
        )
    for kv_type in (settings.kv_k, settings.kv_v):
        if kv_type not in KV_TYPES:
            raise ConfigError(f"--kv {kv_type} must be one of {', '.join(KV_TYPES)}.", field="--kv")


def _stage_ranges(settings: EngineSettings, model: Model) -> tuple[LayerRange, ...]:
    """The layers of each stage."""
    n_layers = model.n_layers
    if len(settings.layer_split) > n_layers:
        raise ConfigError(
            f"--layer-split has {len(settings.layer_split)} parts, more than the model's {n_layers} layers.",
            field="--layer-split",
        )
    on_devices = settings.gpu_layers if model.has_devices and settings.gpu_layers else n_layers + 1
    return layer_ranges(settings.layer_split, n_layers, first=max(0, n_layers + 1 - on_devices))


def default_threads() -> int:
    """The physical cores this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


def _shape(
    settings: EngineSettings, threads: int, flash: FlashChoice, *, cells: int, unified: bool = True
) -> ContextShape:
    return ContextShape(
        cells=cells,
        sequences=settings.slots + (_spares(settings) + _RESERVED_SEQUENCES if unified else 0),
        batch=max(settings.read_chunk + settings.slots, _PROBE_BATCH),
        threads=threads,
        flash_attention=flash.on,
        kv_k=settings.kv_k,
        kv_v=settings.kv_v,
        swa_full=settings.swa_full,
        unified=unified,
    )


def _default_context(model: Model, settings: EngineSettings, threads: int, flash: FlashChoice) -> int:
    """The model's own context, capped so that the whole pool takes at most a quarter of the RAM.

    A pool whose size was given is the cap instead.
    """
    if settings.pool_cells is not None:
        return min(model.context_train, settings.pool_cells)
    context = Context(model, _shape(settings, threads, flash, cells=MARGIN_CELLS))
    try:
        context.feed(0, [0] * 4, 0)
        state, _ = recognise(context.state(0), context.layout)
        if not settings.swa_full:  # what slides does not grow with the context
            state = replace(state, parts=state.parts[:1])
        per_token = token_bytes(state)
    except BadState:
        per_token = 0
    finally:
        context.close()
    if not per_token:
        return model.context_train
    most = _physical_ram() // _POOL_SHARE // (settings.slots * per_token)
    return min(model.context_train, max(_CONTEXT_STEP, most // _CONTEXT_STEP * _CONTEXT_STEP))


def _physical_ram() -> int:
    """Bytes of RAM this process may use at most: the machine's, or its control group's limit."""
    total = int(psutil.virtual_memory().total)
    for limit in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        try:
            total = min(total, int(limit.read_text()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return total


def _facts(model: Model, context: Context, proof: Proof, files: Sequence[GgufFile]) -> StateFacts:
    long_rope = None
    if any("rope_factors_long" in tensor.name for file in files for tensor in file.tensors):
        architecture = model.metadata("general.architecture") or ""
        original = model.metadata(f"{architecture}.rope.scaling.original_context_length")
        long_rope = context.cells_per_sequence > int(original or model.context_train)
    magic, version = STATE_VERSION
    return StateFacts(
        kv_k=context.shape.kv_k,
        kv_v=context.shape.kv_v,
        transposed_v=proof.transposed_v,
        state_magic=magic,
        state_version=version,
        long_rope=long_rope,
        mode=proof.mode,
    )


def _openers(turn_token: str, model: Model, template: ChatTemplate) -> tuple[int, ...]:
    vocabulary = model.vocabulary
    if turn_token == "none":
        return ()
    if turn_token == "auto":
        found = find_openers(
            lambda messages, prompt: template.render(messages, add_generation_prompt=prompt),
            vocabulary.tokenize,
            lambda token: vocabulary.is_marker(token) and token not in vocabulary.end_of_generation,
            vocabulary.text_of(vocabulary.bos),
        )
        return tuple(sorted(found))
    if turn_token.isdecimal() and int(turn_token) < vocabulary.n_tokens:
        return (int(turn_token),)
    raise ConfigError(
        f"--turn-token {turn_token} must be auto, none or a token id below {vocabulary.n_tokens}.", field="--turn-token"
    )
