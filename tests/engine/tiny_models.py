"""Tiny GGUF models with random weights, one per kind of memory, for tests. They borrow a real model's vocabulary.

What they generate is noise; what counts is that llama.cpp builds the right caches for them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter

EMBED, FEED, HEADS, HEAD_DIM = 128, 96, 4, 32  # heads of 32: quantised K and V come in blocks of 32
ROPE_SECTIONS = [4, 6, 6, 0]
VOCABULARY = 2048  # of the borrowed one: enough for any test, and keeps the files small


class TinyModel:
    """A GGUF being written: metadata under the architecture's prefix, random tensors."""

    def __init__(
        self, path: Path, architecture: str, n_layers: int, source: GGUFReader, output_norm: str = "output_norm"
    ) -> None:
        self._writer = GGUFWriter(path, architecture)
        self._random = np.random.default_rng(7)
        self.n_layers = n_layers
        self._writer.add_string("general.name", f"tiny {path.stem}")
        self.number("block_count", n_layers)
        self.number("context_length", 4096)
        self.number("embedding_length", EMBED)
        self.number("feed_forward_length", FEED)
        self.real("attention.layer_norm_rms_epsilon", 1e-6)
        self._copy_vocabulary(source)
        self.matrix("token_embd.weight", VOCABULARY, EMBED)
        self.ones(f"{output_norm}.weight", EMBED)

    def _copy_vocabulary(self, source: GGUFReader) -> None:
        add = {
            GGUFValueType.STRING: self._writer.add_string,
            GGUFValueType.BOOL: self._writer.add_bool,
            GGUFValueType.UINT32: self._writer.add_uint32,
            GGUFValueType.FLOAT32: self._writer.add_float32,
        }
        for key, field in source.fields.items():
            if not key.startswith("tokenizer."):
                continue
            value = field.contents()
            if field.types[0] is GGUFValueType.ARRAY:
                # the first merges only make tokens that are still there
                self._writer.add_array(key, value[: 200 if key == "tokenizer.ggml.merges" else VOCABULARY])
            else:
                add[field.types[0]](key, value)

    def number(self, key: str, value: int) -> None:
        self._writer.add_uint32(f"{self._writer.arch}.{key}", value)

    def real(self, key: str, value: float) -> None:
        self._writer.add_float32(f"{self._writer.arch}.{key}", value)

    def numbers(self, key: str, values: list[int]) -> None:
        self._writer.add_array(f"{self._writer.arch}.{key}", values)

    def matrix(self, name: str, n_out: int, n_in: int, dtype: type = np.float16) -> None:
        self._writer.add_tensor(name, (self._random.standard_normal((n_out, n_in)) / np.sqrt(n_in)).astype(dtype))

    def matrices(self, name: str, count: int, n_out: int, n_in: int) -> None:
        """One matrix per head."""
        values = self._random.standard_normal((count, n_out, n_in)) / np.sqrt(n_in)
        self._writer.add_tensor(name, values.astype(np.float16))

    def vector(self, name: str, values: np.ndarray) -> None:
        self._writer.add_tensor(name, values.astype(np.float32))

    def ones(self, name: str, n: int) -> None:
        self.vector(name, 1 + 0.1 * self._random.standard_normal(n))

    def noise(self, name: str, n: int) -> None:
        self.vector(name, self._random.standard_normal(n))

    def heads(self, kv: int | list[int]) -> None:
        self.number("attention.head_count", HEADS)
        if isinstance(kv, int):
            self.number("attention.head_count_kv", kv)
        else:
            self.numbers("attention.head_count_kv", kv)
        self.number("attention.key_length", HEAD_DIM)
        self.number("attention.value_length", HEAD_DIM)

    def attention(self, prefix: str, kv: int, *, gated: int = 1, norms: bool = True) -> None:
        self.matrix(prefix + "attn_q.weight", gated * HEADS * HEAD_DIM, EMBED)
        self.matrix(prefix + "attn_k.weight", kv * HEAD_DIM, EMBED)
        self.matrix(prefix + "attn_v.weight", kv * HEAD_DIM, EMBED)
        self.matrix(prefix + "attn_output.weight", EMBED, HEADS * HEAD_DIM)
        if norms:
            self.ones(prefix + "attn_q_norm.weight", HEAD_DIM)
            self.ones(prefix + "attn_k_norm.weight", HEAD_DIM)

    def feed_forward(self, prefix: str) -> None:
        self.matrix(prefix + "ffn_gate.weight", FEED, EMBED)
        self.matrix(prefix + "ffn_up.weight", FEED, EMBED)
        self.matrix(prefix + "ffn_down.weight", EMBED, FEED)

    def save(self) -> None:
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_tensors_to_file()
        self._writer.close()


def qwen2vl(path: Path, source: GGUFReader) -> None:
    """Plain attention whose cells carry extra coordinates (M-RoPE)."""
    model = TinyModel(path, "qwen2vl", 5, source)
    model.heads(2)
    model.numbers("rope.dimension_sections", ROPE_SECTIONS)
    for prefix in (f"blk.{i}." for i in range(model.n_layers)):
        model.ones(prefix + "attn_norm.weight", EMBED)
        model.attention(prefix, 2, norms=False)
        for name, n in (("q", HEADS), ("k", 2), ("v", 2)):
            model.noise(f"{prefix}attn_{name}.bias", n * HEAD_DIM)
        model.ones(prefix + "ffn_norm.weight", EMBED)
        model.feed_forward(prefix)
    model.save()


def gemma3(path: Path, source: GGUFReader) -> None:
    """Sliding window of 64 in five of every six layers."""
    model = TinyModel(path, "gemma3", 7, source)
    model.heads(1)
    model.number("attention.sliding_window", 64)
    model.real("rope.freq_base", 1e6)
    for prefix in (f"blk.{i}." for i in range(model.n_layers)):
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            model.ones(f"{prefix}{name}.weight", EMBED)
        model.attention(prefix, 1)
        model.feed_forward(prefix)
    model.save()


def qwen35(path: Path, source: GGUFReader) -> None:
    """Hybrid: every fourth layer attends, the others are recurrent."""
    model = TinyModel(path, "qwen35", 8, source)
    state, groups, rank, conv = 32, 2, 4, 4
    inner, key_dim, value_dim = rank * state, state * groups, state * rank
    model.heads(2)
    model.number("rope.dimension_count", HEAD_DIM)
    model.numbers("rope.dimension_sections", ROPE_SECTIONS)
    model.real("rope.freq_base", 1e7)
    ssm = {"conv_kernel": conv, "inner_size": inner, "state_size": state, "time_step_rank": rank, "group_count": groups}
    for key, value in ssm.items():
        model.number(f"ssm.{key}", value)
    model.number("full_attention_interval", 4)
    model.matrix("output.weight", VOCABULARY, EMBED)
    for i in range(model.n_layers):
        prefix = f"blk.{i}."
        model.ones(prefix + "attn_norm.weight", EMBED)
        model.ones(prefix + "post_attention_norm.weight", EMBED)
        model.feed_forward(prefix)
        if (i + 1) % 4 == 0:
            model.attention(prefix, 2, gated=2)
            continue
        model.matrix(prefix + "attn_qkv.weight", 2 * key_dim + value_dim, EMBED)
        model.matrix(prefix + "attn_gate.weight", value_dim, EMBED)
        model.matrix(prefix + "ssm_conv1d.weight", 2 * key_dim + value_dim, conv, np.float32)
        model.noise(prefix + "ssm_dt.bias", rank)
        model.vector(prefix + "ssm_a", -np.exp(np.linspace(-4, -2, rank)))
        model.matrix(prefix + "ssm_beta.weight", rank, EMBED)
        model.matrix(prefix + "ssm_alpha.weight", rank, EMBED)
        model.ones(prefix + "ssm_norm.weight", state)
        model.matrix(prefix + "ssm_out.weight", EMBED, value_dim)
    model.save()


def lfm2(path: Path, source: GGUFReader, *, window: int = 0) -> None:
    """Hybrid of short convolutions and attention; with `window`, the attention slides."""
    kv_heads, cached = [0, 0, 2, 0, 2, 2], 3
    model = TinyModel(path, "lfm2", len(kv_heads), source, output_norm="token_embd_norm")
    model.number("attention.head_count", HEADS)
    model.numbers("attention.head_count_kv", kv_heads)
    model.real("rope.freq_base", 1e6)
    model.number("shortconv.l_cache", cached)
    model.number("vocab_size", VOCABULARY)
    if window:
        model.number("attention.sliding_window", window)
    head_dim = EMBED // HEADS
    for i, kv in enumerate(kv_heads):
        prefix = f"blk.{i}."
        model.ones(prefix + "attn_norm.weight", EMBED)
        model.ones(prefix + "ffn_norm.weight", EMBED)
        model.feed_forward(prefix)
        if kv:
            for name, n in (("q", EMBED), ("k", kv * head_dim), ("v", kv * head_dim), ("output", EMBED)):
                model.matrix(f"{prefix}attn_{name}.weight", n, EMBED)
            model.ones(prefix + "attn_q_norm.weight", head_dim)
            model.ones(prefix + "attn_k_norm.weight", head_dim)
        else:
            model.matrix(prefix + "shortconv.conv.weight", EMBED, cached, np.float32)
            model.matrix(prefix + "shortconv.in_proj.weight", 3 * EMBED, EMBED)
            model.matrix(prefix + "shortconv.out_proj.weight", EMBED, EMBED)
    model.save()


def lfm2_window(path: Path, source: GGUFReader) -> None:
    lfm2(path, source, window=128)


def mamba(path: Path, source: GGUFReader) -> None:
    """Recurrent throughout."""
    model = TinyModel(path, "mamba", 4, source)
    inner, state, rank, conv = 2 * EMBED, 16, 4, 4
    for key, value in {"conv_kernel": conv, "inner_size": inner, "state_size": state, "time_step_rank": rank}.items():
        model.number(f"ssm.{key}", value)
    model.number("attention.head_count", 0)
    model.matrix("output.weight", VOCABULARY, EMBED)
    for prefix in (f"blk.{i}." for i in range(model.n_layers)):
        model.ones(prefix + "attn_norm.weight", EMBED)
        model.matrix(prefix + "ssm_in.weight", 2 * inner, EMBED)
        model.matrix(prefix + "ssm_conv1d.weight", inner, conv, np.float32)
        model.noise(prefix + "ssm_conv1d.bias", inner)
        model.matrix(prefix + "ssm_x.weight", rank + 2 * state, inner)
        model.matrix(prefix + "ssm_dt.weight", inner, rank, np.float32)
        model.noise(prefix + "ssm_dt.bias", inner)
        model.vector(prefix + "ssm_a", -np.tile(np.arange(1, state + 1) * 0.05, (inner, 1)))
        model.ones(prefix + "ssm_d", inner)
        model.matrix(prefix + "ssm_out.weight", EMBED, inner)
    model.save()


def deepseek32(path: Path, source: GGUFReader) -> None:
    """Latent attention with a cache for its index beside it (DSA): a state that `layout.py` cannot read."""
    q_rank, kv_rank, rope, plain, index_heads, index_dim = 32, 512, 32, 32, 2, 64
    model = TinyModel(path, "deepseek32", 2, source)
    model.number("attention.head_count", HEADS)
    model.number("attention.head_count_kv", 1)
    attention = {
        "key_length": kv_rank + rope,
        "value_length": kv_rank,
        "key_length_mla": plain + rope,
        "value_length_mla": HEAD_DIM,
        "q_lora_rank": q_rank,
        "kv_lora_rank": kv_rank,
        "indexer.head_count": index_heads,
        "indexer.key_length": index_dim,
        "indexer.top_k": 64,
    }
    experts = {"leading_dense_block_count": model.n_layers, "expert_count": 4, "expert_used_count": 2}
    experts |= {"expert_feed_forward_length": 32, "expert_shared_count": 1, "expert_gating_func": 2}
    for key, value in {**{f"attention.{key}": value for key, value in attention.items()}, **experts}.items():
        model.number(key, value)
    model.number("rope.dimension_count", rope)
    model.number("vocab_size", VOCABULARY)
    model.matrix("output.weight", VOCABULARY, EMBED)
    for prefix in (f"blk.{i}." for i in range(model.n_layers)):
        model.ones(prefix + "attn_norm.weight", EMBED)
        model.ones(prefix + "ffn_norm.weight", EMBED)
        model.matrix(prefix + "attn_q_a.weight", q_rank, EMBED)
        model.ones(prefix + "attn_q_a_norm.weight", q_rank)
        model.matrix(prefix + "attn_q_b.weight", HEADS * (plain + rope), q_rank)
        model.matrix(prefix + "attn_kv_a_mqa.weight", kv_rank + rope, EMBED)
        model.ones(prefix + "attn_kv_a_norm.weight", kv_rank)
        model.matrices(prefix + "attn_k_b.weight", HEADS, kv_rank, plain)
        model.matrices(prefix + "attn_v_b.weight", HEADS, HEAD_DIM, kv_rank)
        model.matrix(prefix + "attn_output.weight", EMBED, HEADS * HEAD_DIM)
        model.feed_forward(prefix)
        model.matrix(prefix + "indexer.attn_k.weight", index_dim, EMBED)
        model.ones(prefix + "indexer.k_norm.weight", index_dim)
        model.noise(prefix + "indexer.k_norm.bias", index_dim)
        model.matrix(prefix + "indexer.proj.weight", index_heads, EMBED)
        model.matrix(prefix + "indexer.attn_q_b.weight", index_heads * index_dim, q_rank)
    model.save()


TINY: dict[str, Callable[[Path, GGUFReader], None]] = {
    "qwen2vl": qwen2vl,
    "gemma3": gemma3,
    "qwen35": qwen35,
    "lfm2": lfm2,
    "lfm2_window": lfm2_window,
    "mamba": mamba,
    "deepseek32": deepseek32,
}


def write_tiny_models(folder: Path, vocabulary_of: Path) -> dict[str, Path]:
    """Write every tiny model; their paths by name."""
    source = GGUFReader(vocabulary_of)
    paths = {name: folder / f"{name}.gguf" for name in TINY}
    for name, write in TINY.items():
        write(paths[name], source)
    return paths
