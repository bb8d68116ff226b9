"""Shared memory for captured state: chunks, large pages, pre-touching and span allocation.

Covers both ends: `Arena` (the front process grows it, allocates from it and hands its chunks out) and `map_chunk` (the
engine process). Linux backs a chunk with one memfd, handed over by descriptor; elsewhere it is a named `SharedMemory`.
This is the only module that creates, maps or advises shared memory, with `large_pages.py`.

It does not decide how much RAM may be used (the caller gives the limit), does not carry descriptors between processes,
and knows nothing of what lies in a span. `alloc`, `free`, `reserve` and `close` belong to one thread; views to any.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker, shared_memory
from typing import Protocol

from strata.store.large_pages import collapse
from strata.store.spans import FreeList, plan_chunk
from strata.types import MIB, PAGE, Span, pad_to_page

CHUNK_BYTES = 64 * MIB
NO_LARGE_PAGES = "STRATA_NO_LARGEPAGES"
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap has no name for it
_TOUCH_STEP = 8 * MIB  # one step of the pre-touch thread: `close` never waits longer than this takes

ChunkCallback = Callable[[int, int, int | None, str | None], None]
"""(chunk index, size in bytes, descriptor, name): exactly one of the last two is given."""


# ---------------------------------------------------------------------------------------------------- one chunk, mapped


class MappedChunk(Protocol):
    """A chunk in this process's address space."""

    @property
    def view(self) -> memoryview: ...
    @property
    def fd(self) -> int | None: ...
    @property
    def name(self) -> str | None: ...
    @property
    def asked_large_pages(self) -> bool: ...
    def close(self) -> None:
        """Unmap, as soon as the last view of it is gone."""
        ...


class _MemfdChunk:
    """A chunk backed by a memfd. The owner's descriptor stays open, so that a later engine process can be given it."""

    name: str | None = None

    def __init__(self, fd: int, size: int, *, owner: bool, large_pages: bool) -> None:
        self.fd: int | None = fd if owner else None
        self._map = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self.view = memoryview(self._map)
        self.asked_large_pages = large_pages and _ask_large_pages(self._map)

    @classmethod
    def create(cls, size: int, *, large_pages: bool) -> _MemfdChunk:
        fd = os.memfd_create("strata-arena", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            return cls(fd, size, owner=True, large_pages=large_pages)
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        self.view.release()
        with suppress(BufferError):  # views are still out: the mapping goes with the last of them
            self._map.close()
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class _NamedChunk:
    """A chunk backed by `multiprocessing.shared_memory`, found by its name."""

    fd: int | None = None
    asked_large_pages = False

    def __init__(self, memory: shared_memory.SharedMemory, size: int, *, owner: bool) -> None:
        self._memory = memory
        self._owner = owner
        self.name: str | None = memory.name
        assert memory.buf is not None, "just opened"
        self.view = memory.buf[:size]

    @classmethod
    def create(cls, size: int, *, large_pages: bool) -> _NamedChunk:
        return cls(shared_memory.SharedMemory(create=True, size=size), size, owner=True)

    @classmethod
    def attach(cls, name: str, size: int) -> _NamedChunk:
        if sys.version_info >= (3, 13):
            return cls(shared_memory.SharedMemory(name=name, track=False), size, owner=False)
        memory = shared_memory.SharedMemory(name=name)
        if os.name == "posix":  # else this process's tracker would remove the front's memory when the engine ends
            resource_tracker.unregister("/" + memory.name.lstrip("/"), "shared_memory")
        return cls(memory, size, owner=False)

    def close(self) -> None:
        self.view.release()
        with suppress(BufferError):
            self._memory.close()
        if self._owner:
            self._memory.unlink()
            self._owner = False


def map_chunk(fd: int | None, name: str | None, size: int) -> MappedChunk:
    """Map a chunk of another process's arena and fill this process's page table for it.

    `fd` may be closed by the caller afterwards. Raises OSError when the chunk cannot be mapped.
    """
    chunk: MappedChunk
    if fd is not None:
        chunk = _MemfdChunk(fd, size, owner=False, large_pages=large_pages_wanted(os.environ))
    elif name is not None:
        chunk = _NamedChunk.attach(name, size)
    else:
        raise ValueError("map_chunk needs a descriptor or a name")
    _touch(chunk.view)
    return chunk


def _ask_large_pages(mapping: mmap.mmap) -> bool:
    """Advise large pages; False when this kernel does not know them."""
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, AttributeError):
        return False
    return True


def _touch(view: memoryview) -> None:
    """Make every page of `view` resident without changing a byte: others may be writing to it."""
    if _populate(view):
        return
    for start in range(0, len(view), MIB):
        bytes(view[start : start + MIB : PAGE])


def _populate(view: memoryview) -> bool:
    """MADV_POPULATE_WRITE over `view`, without the GIL (mmap.madvise would hold it). False when not available."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    anchor = ctypes.c_char.from_buffer(view)
    address, length = ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(len(view))
    return bool(libc.madvise(address, length, ctypes.c_int(_MADV_POPULATE_WRITE)) == 0)


def _make_large(memory: MappedChunk, start: int, end: int) -> bool:
    """Large pages for what is resident; False when they were wanted and some of it could not be had in them."""
    if not memory.asked_large_pages or memory.fd is None:
        return True
    return collapse(memory.fd, start, end)


def large_pages_wanted(environ: Mapping[str, str]) -> bool:
    """Large pages are asked for unless STRATA_NO_LARGEPAGES=1."""
    return environ.get(NO_LARGE_PAGES, "") != "1"


# ------------------------------------------------------------------------------------------------------------ the arena


class Backing(Protocol):
    """Creates a chunk of exactly `size` bytes, or raises OSError."""

    def __call__(self, size: int, *, large_pages: bool) -> MappedChunk: ...


def platform_backing(*, has_memfd: bool = hasattr(os, "memfd_create")) -> Backing:
    """memfd where the system has it, named shared memory elsewhere."""
    return _MemfdChunk.create if has_memfd else _NamedChunk.create


@dataclass(slots=True)
class _Chunk:
    memory: MappedChunk
    size: int
    free: FreeList
    touched: int = 0  # bytes from the chunk's start that are resident; only ever grows


class Arena:
    """Spans of shared memory, bounded by `limit_bytes`, grown in chunks of `chunk_bytes`."""

    def __init__(
        self,
        limit_bytes: int,
        chunk_bytes: int = CHUNK_BYTES,
        *,
        pretouch: bool = True,
        large_pages: bool | None = None,
        backing: Backing | None = None,
    ) -> None:
        """`large_pages` None asks unless STRATA_NO_LARGEPAGES=1. Takes no memory and starts no thread yet."""
        if limit_bytes < 0 or chunk_bytes < PAGE or chunk_bytes % PAGE:
            raise ValueError(f"limit {limit_bytes} must be >= 0 and chunk {chunk_bytes} a positive multiple of {PAGE}")
        self.limit_bytes = limit_bytes // PAGE * PAGE
        self.reserved_bytes = 0
        self.used_bytes = 0
        self.last_error: str | None = None
        """Why the system last refused a chunk."""
        self._chunk_bytes = chunk_bytes
        self._large_pages = large_pages_wanted(os.environ) if large_pages is None else large_pages
        self._backing = backing or platform_backing()
        self._chunks: list[_Chunk] = []
        self._live: dict[tuple[int, int], int] = {}  # (chunk, offset) -> length of every span handed out
        self._callbacks: list[ChunkCallback] = []
        self._toucher = _Toucher() if pretouch else None

    def __repr__(self) -> str:
        return (
            f"Arena(used {self.used_bytes}, reserved {self.reserved_bytes}, touched {self.touched_bytes}, "
            f"limit {self.limit_bytes}, {len(self._chunks)} chunks, {len(self._live)} spans)"
        )

    @property
    def touched_bytes(self) -> int:
        """Bytes already made resident by the pre-touch thread."""
        return sum(chunk.touched for chunk in self._chunks)

    @property
    def idle_bytes(self) -> int:
        """Bytes that are resident and in no span: taking them costs the system nothing (an estimate while it grows)."""
        return max(0, self.touched_bytes - self.used_bytes)

    @property
    def asked_large_bytes(self) -> int:
        """Bytes for which the system took our request for large pages (it may still back them with small ones)."""
        return sum(chunk.size for chunk in self._chunks if chunk.memory.asked_large_pages)

    def alloc(self, length: int) -> Span | None:
        """A span of at least `length` bytes (rounded up to pages), resident memory first; None when exhausted."""
        if length <= 0:
            raise ValueError(f"span length {length} must be positive")
        length = pad_to_page(length)
        span = self._take(length, touched_only=True) or self._take(length, touched_only=False)
        if span is None and self._grow(length):
            span = self._take(length, touched_only=False)
        return span

    def free(self, span: Span) -> None:
        """Give a span back. ValueError when it is not one that `alloc` returned, or was freed before."""
        self._check(span)
        del self._live[span.chunk, span.offset]
        self.used_bytes -= span.length
        self._chunks[span.chunk].free.give(span.offset, span.length)

    def view(self, span: Span) -> memoryview:
        """The span's bytes, writable, without a copy. Do not use it after `free`."""
        self._check(span)
        return self._chunks[span.chunk].memory.view[span.offset : span.offset + span.length]

    def reserve(self, n_bytes: int) -> int:
        """Grow until `n_bytes` (at most the limit) are reserved; returns the bytes reserved now."""
        while self.reserved_bytes < min(n_bytes, self.limit_bytes) and self._grow(PAGE):
            pass
        return self.reserved_bytes

    def on_chunk(self, callback: ChunkCallback) -> None:
        """Call back for every chunk there is, now, and for every future one before a span of it is handed out."""
        self._callbacks.append(callback)
        for i, chunk in enumerate(self._chunks):
            callback(i, chunk.size, chunk.memory.fd, chunk.memory.name)

    def close(self) -> None:
        """Stop the pre-touch thread and unmap. Spans and views become invalid."""
        if self._toucher is not None:
            self._toucher.stop()
        for chunk in self._chunks:
            chunk.memory.close()
        self._chunks.clear()
        self._live.clear()
        self._callbacks.clear()
        self.limit_bytes = self.reserved_bytes = self.used_bytes = 0

    def _check(self, span: Span) -> None:
        if self._live.get((span.chunk, span.offset)) != span.length:
            raise ValueError(f"{span} is not a live span of this arena")

    def _take(self, length: int, *, touched_only: bool) -> Span | None:
        for i, chunk in enumerate(self._chunks):
            offset = chunk.free.take(length, chunk.touched if touched_only else chunk.size)
            if offset is not None:
                self._live[i, offset] = length
                self.used_bytes += length
                return Span(i, offset, length)
        return None

    def _grow(self, length: int) -> bool:
        """Add one chunk that holds `length`; False when the limit or the system does not allow it."""
        size = plan_chunk(length, self._chunk_bytes, self.limit_bytes - self.reserved_bytes)
        if size is None:
            return False
        try:
            memory = self._backing(size, large_pages=self._large_pages)
        except OSError as error:
            self.last_error = str(error)
            return False
        chunk = _Chunk(memory, size, FreeList(size))
        self._chunks.append(chunk)
        self.reserved_bytes += size
        for callback in self._callbacks:
            callback(len(self._chunks) - 1, size, memory.fd, memory.name)
        if self._toucher is not None:
            self._toucher.add(chunk)
        return True


class _Toucher:
    """Makes new chunks resident, in large pages, on a thread of its own that begins with the first chunk."""

    def __init__(self) -> None:
        self._chunks: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, chunk: _Chunk) -> None:
        self._chunks.put(chunk)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="arena-touch", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._chunks.put(None)
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (chunk := self._chunks.get()) is not None:
            is_large = True
            while chunk.touched < chunk.size and not self._stopping.is_set():
                end = min(chunk.touched + _TOUCH_STEP, chunk.size)
                _touch(chunk.memory.view[chunk.touched : end])
                is_large &= _make_large(chunk.memory, chunk.touched, end)
                chunk.touched = end
            if not is_large:  # what a device was reading into just then stays as it was
                _make_large(chunk.memory, 0, chunk.touched)
