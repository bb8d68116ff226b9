"""Frames over a real pipe."""

from __future__ import annotations

import os
import threading

import pytest

from strata.engine.protocol import MAX_FRAME_BYTES, Cancel, Detokenize, Done, Prepare, Progress
from strata.engine.wire import HEAD, EventWriter, decode_event, encode_frame, read_commands


def test_commands_arrive_whole_and_in_order() -> None:
    sent = [Cancel(request=1), Detokenize(job=2, tokens=os.urandom(3_000_000)), Prepare(job=3, text="ü" * 70_000)]
    reader, writer = os.pipe()

    def send() -> None:
        data = b"".join(map(encode_frame, sent))
        while data:
            data = data[os.write(writer, data[:50_001]) :]
        os.close(writer)

    thread = threading.Thread(target=send)
    thread.start()
    assert list(read_commands(reader)) == sent
    thread.join()
    os.close(reader)


def test_events_of_one_step_leave_in_one_write() -> None:
    reader, writer = os.pipe()
    events = [Progress(request=1, held=2, total=3), Done(job=4, ok=True, held=5)]
    EventWriter(writer).send(events)
    data = os.read(reader, 1 << 16)
    found = []
    while data:
        (size,) = HEAD.unpack_from(data)
        found.append(decode_event(data[HEAD.size : HEAD.size + size]))
        data = data[HEAD.size + size :]
    assert found == events
    os.close(reader)
    os.close(writer)


def test_a_length_beyond_the_limit_is_not_believed() -> None:
    reader, writer = os.pipe()
    os.write(writer, HEAD.pack(MAX_FRAME_BYTES + 1))
    os.close(writer)
    with pytest.raises(ValueError, match="exceeds the limit"):
        list(read_commands(reader))
    os.close(reader)
