"""The identity of parked state: which model, K/V layout and llama.cpp state format it belongs to.

A pure function of the model's files and a few values. It covers the whole header, metadata (tokenizer included) and
tensor table, and samples of every tensor's data: enough to tell models apart, not a proof of integrity. Deliberately
not part of it: slots, threads, layers on a GPU and the context size (except where rope depends on it).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import BinaryIO

from blake3 import blake3

from strata.engine.gguf import GgufFile, TensorPlace

PAYLOAD_VERSION = 1
"""Version of the canonical payload (`ranges.py`); raise it when the bytes of the same state change."""

_CONTEXT = "strata 2026-11 engine fingerprint"
_SAMPLE_BYTES = 4096
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFacts:
    """What decides, besides the model, whether one state can stand for another."""

    kv_k: str
    kv_v: str
    transposed_v: bool
    state_magic: int
    state_version: int
    long_rope: bool | None
    """Whether the long rope factors are in use; None for models without them."""
    mode: str = "segments"
    """EngineInfo.mode: what is kept in one is of no use in another."""


def fingerprint(files: Iterable[GgufFile], facts: StateFacts) -> bytes:
    """32 bytes of BLAKE3. Raises OSError when a file cannot be read."""
    hasher = blake3(derive_key_context=_CONTEXT)
    for file in files:
        with file.path.open("rb") as data:
            _field(hasher, _hash_of(data, file.data_offset))
            for tensor in file.tensors:
                _field(hasher, _sample(data, tensor))
    for text in (facts.kv_k, facts.kv_v, str(facts.transposed_v), str(facts.long_rope)):
        _field(hasher, text.encode())
    if facts.mode != "segments":
        _field(hasher, facts.mode.encode())
    hasher.update(struct.pack("<III", facts.state_magic, facts.state_version, PAYLOAD_VERSION))
    return hasher.digest()


def _field(hasher: blake3, data: bytes) -> None:
    """Add `data` framed by its length, so that no two lists of fields hash alike."""
    hasher.update(struct.pack("<Q", len(data)))
    hasher.update(data)


def _hash_of(data: BinaryIO, n_bytes: int) -> bytes:
    hasher = blake3()
    while n_bytes > 0 and (piece := data.read(min(n_bytes, _READ_BYTES))):
        hasher.update(piece)
        n_bytes -= len(piece)
    return hasher.digest()


def _sample(data: BinaryIO, tensor: TensorPlace) -> bytes:
    """The first, middle and last 4 KiB of a tensor; all of a small one."""
    if tensor.n_bytes <= 3 * _SAMPLE_BYTES:
        data.seek(tensor.offset)
        return data.read(tensor.n_bytes)
    middle, last = (tensor.n_bytes - _SAMPLE_BYTES) // 2, tensor.n_bytes - _SAMPLE_BYTES
    pieces = []
    for at in (0, middle, last):
        data.seek(tensor.offset + at)
        pieces.append(data.read(_SAMPLE_BYTES))
    return b"".join(pieces)
