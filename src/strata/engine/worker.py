"""The engine process: `python -m strata.engine.worker`, commands on stdin, events on stdout.

Three threads: the reader takes commands off the pipe, attaches arena chunks and hands the rest on; the text thread
prepares prompts (the vocabulary is immutable, and llama_tokenize runs without the GIL); the main thread loads the model
and then runs `loop.Loop`. The process ends with the front: when the pipe ends, and on Linux by a parent-death signal.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback

import msgspec

from strata.engine.chunks import Chunks
from strata.engine.loop import Loop
from strata.engine.prompts import Prompts
from strata.engine.protocol import (
    AttachChunk,
    Cancel,
    Command,
    Detokenize,
    Detokenized,
    Event,
    JobFailed,
    Load,
    LoadFailed,
    Loading,
    Ping,
    Pong,
    Prepare,
    Prepared,
    Ready,
    pack_tokens,
    unpack_tokens,
)
from strata.engine.startup import Served, load
from strata.engine.template import TemplateRefused
from strata.engine.wire import EventWriter, read_commands
from strata.errors import StrataError

_SWITCH_INTERVAL_S = 0.0002  # a decode step must not wait 5 ms for the text thread to give up the GIL
_PROGRESS_STEP = 0.01
_PR_SET_PDEATHSIG = 1
_NO_SOCKET = -1
# A terminal's Ctrl-C or end and a service's stop reach every process; the front decides when we end.
_LEFT_TO_THE_FRONT = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]

TextJob = Prepare | Detokenize


def main() -> None:
    arguments = argparse.ArgumentParser(prog="strata.engine.worker")
    arguments.add_argument("--chunk-socket", type=int, default=_NO_SOCKET)
    descriptor = arguments.parse_args().chunk_socket
    _die_with_parent()
    for number in _LEFT_TO_THE_FRONT:
        signal.signal(number, signal.SIG_IGN)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    commands, events = _take_pipe()
    chunks = Chunks(socket.socket(fileno=descriptor) if descriptor >= 0 else None)
    Worker(commands, EventWriter(events), chunks).run()


def _take_pipe() -> tuple[int, int]:
    """The pipe's two descriptors; afterwards 0 is empty and 1 is stderr, so that nothing else can write into it."""
    commands, events = os.dup(0), os.dup(1)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    return commands, events


def _die_with_parent() -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Worker:
    """The three threads and the queues between them."""

    def __init__(self, commands_fd: int, events: EventWriter, chunks: Chunks) -> None:
        self._commands_fd = commands_fd
        self._events = events
        self._chunks = chunks
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._text_jobs: queue.SimpleQueue[TextJob] = queue.SimpleQueue()
        self._reported: tuple[str, float] = ("", 0.0)
        self._loop: Loop | None = None

    def run(self) -> None:
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        command = self._inbox.get()
        if not isinstance(command, Load):
            raise SystemExit(f"the first command must be Load, not {type(command).__name__}")
        try:
            served = load(command.settings, command.remembered, self._progress)
        except StrataError as error:
            self._events.send([LoadFailed(message=error.message, field=error.field)])
            raise SystemExit(1) from None
        threading.Thread(target=TextThread(served, self._text_jobs, self._events).run, name="text", daemon=True).start()
        self._loop = Loop(served, self._chunks, self._inbox, self._events.send)
        self._events.send([Ready(info=served.info)])
        self._loop.run()

    def _read(self) -> None:
        """The reader thread. The end of the pipe ends the process at once, even in the middle of a step."""
        code = 1  # of a process whose reader failed: it could hear nothing any more
        try:
            for command in read_commands(self._commands_fd):
                self._pass_on(command)
            code = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _pass_on(self, command: Command) -> None:
        if isinstance(command, AttachChunk):
            try:
                self._chunks.attach(command)
            except OSError as error:
                with contextlib.suppress(OSError):  # nobody may read it any more
                    print(f"strata engine: cannot attach arena chunk {command.chunk}: {error}", file=sys.stderr)
        elif isinstance(command, TextJob):
            self._text_jobs.put(command)
        elif isinstance(command, Ping):
            self._events.send([Pong()])
        else:
            if isinstance(command, Cancel) and self._loop is not None:
                self._loop.interrupt(command.request)
            self._inbox.put(command)

    def _progress(self, stage: str, fraction: float) -> None:
        last_stage, last_fraction = self._reported
        if stage != last_stage or fraction >= last_fraction + _PROGRESS_STEP:
            self._reported = (stage, fraction)
            self._events.send([Loading(stage=stage, fraction=fraction)])


class TextThread:
    """Renders, tokenises and detokenises, one job after the other."""

    def __init__(self, served: Served, jobs: queue.SimpleQueue[TextJob], events: EventWriter) -> None:
        self._template = served.template
        self._vocabulary = served.model.vocabulary
        self._prompts = Prompts(self._vocabulary, served.model.metadata("tokenizer.ggml.model"))
        self._jobs = jobs
        self._events = events

    def run(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                event = self._prepare(job) if isinstance(job, Prepare) else self._detokenize(job)
            except (TemplateRefused, msgspec.DecodeError) as error:
                event = JobFailed(job=job.job, message=str(error), client_fault=True)
            except Exception as error:  # a thread that dies would leave every later prompt unanswered
                event = JobFailed(job=job.job, message=f"{type(error).__name__}: {error}")
            self._events.send([event])

    def _prepare(self, job: Prepare) -> Event:
        began = time.perf_counter()
        if job.messages_json is not None:
            text = self._template.render(msgspec.json.decode(job.messages_json, type=list[dict[str, object]]))
        else:
            text = job.text or ""
        rendered = time.perf_counter()
        tokens, reused = self._prompts.tokenize(text, job.owner)
        return Prepared(
            job=job.job,
            tokens=pack_tokens(tokens),
            render_s=rendered - began,
            tokenize_s=time.perf_counter() - rendered,
            reused=reused,
        )

    def _detokenize(self, job: Detokenize) -> Event:
        return Detokenized(job=job.job, text=self._vocabulary.detokenize(unpack_tokens(job.tokens)))


if __name__ == "__main__":
    main()
