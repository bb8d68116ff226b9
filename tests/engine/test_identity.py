"""The GGUF reader and the fingerprint: what identifies parked state, and what does not."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from strata.engine.fingerprint import StateFacts, fingerprint
from strata.engine.gguf import read_model
from strata.errors import ModelError

FACTS = StateFacts(kv_k="f16", kv_v="f16", transposed_v=False, state_magic=0x67677371, state_version=3, long_rope=None)


def identity(path: Path, facts: StateFacts = FACTS) -> bytes:
    return fingerprint(read_model(path), facts)


@pytest.fixture
def copy(tiny_paths: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copy(tiny_paths["qwen2vl"], tmp_path / "copy.gguf"))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_copy_has_the_same_identity(tiny_paths: dict[str, Path], copy: Path) -> None:
    assert identity(copy) == identity(tiny_paths["qwen2vl"])
    assert len(identity(copy)) == 32


def test_metadata_tokens_and_the_name_count(copy: Path) -> None:
    before = identity(copy)
    copy.write_bytes(copy.read_bytes().replace(b"tiny qwen2vl", b"tiny qwen2vX"))
    assert identity(copy) != before
    data = copy.read_bytes()
    assert data.count(b"<|im_start|>") >= 1
    named = identity(copy)
    copy.write_bytes(data.replace(b"<|im_start|>", b"<|im_stXrt|>", 1))
    assert identity(copy) != named


def test_every_tensor_is_sampled(copy: Path) -> None:
    (file,) = read_model(copy)
    before = identity(copy)
    for tensor in file.tensors:
        for at in (tensor.offset, tensor.offset + tensor.n_bytes // 2, tensor.offset + tensor.n_bytes - 1):
            flip(copy, at)
            assert identity(copy) != before, tensor.name
            flip(copy, at)
    assert identity(copy) == before


@pytest.mark.parametrize(
    "change",
    [
        {"kv_k": "q8_0"},
        {"kv_v": "q8_0"},
        {"transposed_v": True},
        {"state_version": 4},
        {"state_magic": 1},
        {"long_rope": False},
        {"long_rope": True},
    ],
    ids=lambda change: str(change),
)
def test_what_decides_the_state_counts(copy: Path, change: dict[str, object]) -> None:
    assert identity(copy, replace(FACTS, **change)) != identity(copy)


def test_swapped_kv_types_are_not_the_same(copy: Path) -> None:
    assert identity(copy, replace(FACTS, kv_k="q8_0")) != identity(copy, replace(FACTS, kv_v="q8_0"))


def test_the_real_model(smollm2_path: Path) -> None:
    (file,) = read_model(smollm2_path)
    assert len(file.tensors) == 272 and file.split_count == 1
    last = max(tensor.offset + tensor.n_bytes for tensor in file.tensors)
    assert last <= smollm2_path.stat().st_size < last + 64


def test_a_split_model_needs_all_its_files(copy: Path, tmp_path: Path) -> None:
    from gguf import GGUFWriter

    for i in (1, 2, 3):
        writer = GGUFWriter(tmp_path / f"m-{i:05d}-of-00003.gguf", "llama")
        writer.add_uint16("split.no", i - 1)
        writer.add_uint16("split.count", 3)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
    first = tmp_path / "m-00001-of-00003.gguf"
    assert [file.path.name for file in read_model(first)] == [f"m-{i:05d}-of-00003.gguf" for i in (1, 2, 3)]
    before = identity(first)
    third = tmp_path / "m-00003-of-00003.gguf"
    third.write_bytes(third.read_bytes().replace(b"split.no", b"split.nX"))
    assert identity(first) != before
    third.unlink()
    with pytest.raises(ModelError, match=r"m-00003-of-00003\.gguf does not exist"):
        read_model(first)
