"""The engine's side of the arena: chunks mapped into this process, and spans as numpy views of them.

Chunks are attached on the reader thread and used on the engine thread; a chunk is never taken away while the process
lives. How chunks are made and freed is the front's concern (`store/arena.py`).
"""

from __future__ import annotations

import socket

import numpy as np

from strata.engine.layout import Bytes
from strata.engine.protocol import AttachChunk
from strata.store.arena import MappedChunk, map_chunk
from strata.types import PAGE, Span


class Chunks:
    """`descriptors`: the socket over which the front sends each memfd, in the order of its AttachChunk commands."""

    def __init__(self, descriptors: socket.socket | None) -> None:
        self._descriptors = descriptors
        self._mapped: dict[int, tuple[MappedChunk, Bytes]] = {}

    def attach(self, command: AttachChunk) -> None:
        """Map a chunk. Raises OSError when that fails; spans in it are then refused one by one."""
        fd = self._receive() if command.name is None else None
        try:
            chunk = map_chunk(fd, command.name, command.size)
        finally:
            if fd is not None:
                socket.close(fd)
        self._mapped[command.chunk] = (chunk, np.frombuffer(chunk.view, np.uint8))

    def _receive(self) -> int:
        if self._descriptors is None:
            raise OSError("a chunk without a name, and no socket to receive its descriptor from")
        _, descriptors, _, _ = socket.recv_fds(self._descriptors, 1, 1)
        if len(descriptors) != 1:
            raise OSError("the descriptor of a chunk did not arrive")
        return descriptors[0]

    def view(self, span: Span) -> Bytes:
        """The bytes of a span. ValueError when it does not lie in an attached chunk, on page boundaries."""
        found = self._mapped.get(span.chunk)
        if found is None:
            raise ValueError(f"chunk {span.chunk} is not attached")
        data = found[1]
        if span.offset < 0 or span.length < 0 or span.offset + span.length > len(data):
            raise ValueError(f"{span} does not lie in its chunk of {len(data)} bytes")
        if span.offset % PAGE or span.length % PAGE:
            raise ValueError(f"{span} is not on page boundaries")
        return data[span.offset : span.offset + span.length]
