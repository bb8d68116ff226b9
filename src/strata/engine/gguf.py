"""A GGUF file before llama.cpp loads it: is it there, is it whole, where does each tensor lie.

Parsed by llama.cpp's own reader (libggml-base, which ships with llama-cpp-python), so both always agree. A file that
cannot be served raises ModelError with the remedy. It does not read tensor data and does not interpret metadata beyond
the number of files of a split model.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.errors import ModelError

_MAGIC = b"GGUF"
_TYPE_UINT16 = 2
_SPLIT_COUNT = b"split.count"
_SPLIT_NAME = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_REMEDY = "Give the path of a GGUF file with --model, or --model demo for the bundled one."


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """Where a tensor's bytes lie in its file."""

    name: str
    offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """One file: the bytes before `data_offset` are header, metadata and tensor table."""

    path: Path
    data_offset: int
    tensors: tuple[TensorPlace, ...]
    split_count: int


class _InitParams(ctypes.Structure):
    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]  # ctypes wants a list


def read_model(path: Path) -> tuple[GgufFile, ...]:
    """The file, or every file of a split model, checked for completeness. Raises ModelError."""
    first = _read(path)
    return (first, *(_read(part) for part in _other_parts(first)))


def _other_parts(first: GgufFile) -> list[Path]:
    match = _SPLIT_NAME.search(first.path.name)
    if first.split_count < 2 or match is None:
        return []
    stem = first.path.name[: match.start()]
    numbers = (i for i in range(1, first.split_count + 1) if i != int(match.group(1)))
    return [first.path.with_name(f"{stem}-{i:05d}-of-{first.split_count:05d}.gguf") for i in numbers]


def _read(path: Path) -> GgufFile:
    size = _checked_size(path)
    lib = _library()
    pointer = lib.gguf_init_from_file(str(path).encode(), _InitParams(no_alloc=True, ctx=None))
    if not pointer:
        raise ModelError(
            f"the header of {path} is damaged or cut off ({size} bytes); fetch the file again.", field="--model"
        )
    try:
        file = _describe(lib, pointer, path)
    finally:
        lib.gguf_free(pointer)
    end = max((t.offset + t.n_bytes for t in file.tensors), default=file.data_offset)
    if size < end:
        raise ModelError(f"{path} is truncated: {size} bytes of {end}; fetch the file again.", field="--model")
    return file


def _checked_size(path: Path) -> int:
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
        size = path.stat().st_size
    except FileNotFoundError:
        raise ModelError(f"the model file {path} does not exist. {_REMEDY}", field="--model") from None
    except IsADirectoryError:
        raise ModelError(f"{path} is a directory. {_REMEDY}", field="--model") from None
    except OSError as error:
        raise ModelError(f"cannot read the model file {path}: {error.strerror}. {_REMEDY}", field="--model") from None
    if magic != _MAGIC:
        kind = "is empty" if not size else "is not a GGUF file"
        raise ModelError(f"{path} {kind}. {_REMEDY}", field="--model")
    return size


def _describe(lib: Any, pointer: int, path: Path) -> GgufFile:
    data_offset = lib.gguf_get_data_offset(pointer)
    tensors = tuple(
        TensorPlace(
            name=lib.gguf_get_tensor_name(pointer, i).decode(errors="replace"),
            offset=data_offset + lib.gguf_get_tensor_offset(pointer, i),
            n_bytes=lib.gguf_get_tensor_size(pointer, i),
        )
        for i in range(lib.gguf_get_n_tensors(pointer))
    )
    split_count, key = 1, lib.gguf_find_key(pointer, _SPLIT_COUNT)
    if key >= 0 and lib.gguf_get_kv_type(pointer, key) == _TYPE_UINT16:
        split_count = max(1, lib.gguf_get_val_u16(pointer, key))
    return GgufFile(path=path, data_offset=data_offset, tensors=tensors, split_count=split_count)


@functools.cache
def _library() -> Any:
    """libggml-base next to llama_cpp, with the signatures used here. Raises ModelError when it is not installed."""
    spec = importlib.util.find_spec("llama_cpp")
    folders = spec.submodule_search_locations if spec else None
    suffix = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
    found = [path for folder in folders or () for path in Path(folder, "lib").glob(f"*ggml-base{suffix}")]
    if not found:
        raise ModelError("llama-cpp-python is not installed completely: libggml-base is missing; install it again.")
    lib = ctypes.CDLL(str(found[0]))
    pointer, number, index = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "gguf_init_from_file": (pointer, [ctypes.c_char_p, _InitParams]),
        "gguf_free": (None, [pointer]),
        "gguf_get_data_offset": (number, [pointer]),
        "gguf_get_n_tensors": (index, [pointer]),
        "gguf_get_tensor_name": (ctypes.c_char_p, [pointer, index]),
        "gguf_get_tensor_offset": (number, [pointer, index]),
        "gguf_get_tensor_size": (number, [pointer, index]),
        "gguf_find_key": (index, [pointer, ctypes.c_char_p]),
        "gguf_get_kv_type": (ctypes.c_int, [pointer, index]),
        "gguf_get_val_u16": (ctypes.c_uint16, [pointer, index]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib
