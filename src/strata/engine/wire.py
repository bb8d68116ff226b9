"""Frames on the pipe: a little-endian u32 length and that many bytes of msgpack.

Covers encoding and cutting a byte stream into messages, for both ends. What the messages mean is `protocol.py`.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterable, Iterator

import msgspec

from strata.engine.protocol import MAX_FRAME_BYTES, Command, Event

HEAD = struct.Struct("<I")
_READ_BYTES = 1 << 20
_encoder = msgspec.msgpack.Encoder()
_command_decoder = msgspec.msgpack.Decoder(Command)
_event_decoder = msgspec.msgpack.Decoder(Event)


def encode_frame(message: Command | Event) -> bytes:
    """One message as a frame. Raises ValueError when it is larger than MAX_FRAME_BYTES."""
    body = _encoder.encode(message)
    return HEAD.pack(frame_size(len(body))) + body


def decode_event(body: bytes) -> Event:
    return _event_decoder.decode(body)


def frame_size(n_bytes: int) -> int:
    """`n_bytes` itself; ValueError when no frame may be that large."""
    if n_bytes > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {n_bytes} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return n_bytes


class FrameCutter:
    """Cuts a stream of bytes, given piece by piece, into the bodies of its frames."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._missing = HEAD.size  # bytes until there is a head, or the rest of a frame, to look at

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that are complete now. Raises ValueError for a length beyond the limit."""
        self._pieces.append(data)
        self._missing -= len(data)
        if self._missing > 0:
            return []
        buffer, at, bodies = b"".join(self._pieces), 0, []
        need = HEAD.size
        while len(buffer) - at >= HEAD.size:
            end = at + HEAD.size + frame_size(HEAD.unpack_from(buffer, at)[0])
            if end > len(buffer):
                need = end - at
                break
            bodies.append(buffer[at + HEAD.size : end])
            at = end
        self._pieces = [buffer[at:]]
        self._missing = need - len(self._pieces[0])
        return bodies


def read_commands(fd: int) -> Iterator[Command]:
    """Commands from a blocking descriptor until its end."""
    cutter = FrameCutter()
    while data := os.read(fd, _READ_BYTES):
        yield from map(_command_decoder.decode, cutter.feed(data))


class EventWriter:
    """Writes events to a blocking descriptor, each batch in one piece; usable from several threads."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def send(self, events: Iterable[Event]) -> None:
        data = b"".join([encode_frame(event) for event in events])
        with self._lock:
            while data:
                data = data[os.write(self._fd, data) :]
