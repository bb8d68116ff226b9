"""Frames on the pipe: a little-endian u32 length and that many bytes of msgpack.

Covers encoding and cutting a byte stream into messages, for both ends. What the messages mean is `protocol.py`.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

import msgspec

from strata.engine.protocol import MAX_FRAME_BYTES, Command, Event

HEAD = struct.Struct("<I")
_READ_BYTES = 1 << 20
_encoder = msgspec.msgpack.Encoder()
_command_decoder = msgspec.msgpack.Decoder(Command)
_event_decoder = msgspec.msgpack.Decoder(Event)
_M = TypeVar("_M")


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


def read_commands(fd: int) -> Iterator[Command]:
    """Commands from a blocking descriptor until its end."""
    buffer = bytearray()
    while data := os.read(fd, _READ_BYTES):
        buffer += data
        at = 0
        while len(buffer) - at >= HEAD.size:
            end = at + HEAD.size + frame_size(HEAD.unpack_from(buffer, at)[0])
            if end > len(buffer):
                break
            yield _command_decoder.decode(memoryview(buffer)[at + HEAD.size : end].tobytes())
            at = end
        del buffer[:at]


class EventWriter:
    """Writes events to a blocking descriptor, each batch in one piece; usable from several threads."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def send(self, events: Iterable[Event]) -> None:
        data = memoryview(b"".join(encode_frame(event) for event in events))
        with self._lock:
            while data:
                data = data[os.write(self._fd, data) :]
