"""The life of a `strata serve` process, around a scripted server: loading, ready, signals, and an orderly end."""

from __future__ import annotations

import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from strata.cli.process import raise_descriptor_limit

WAIT_S = 20.0
PROGRAM = Path(__file__).with_name("scripted_process.py")
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


class Process:
    """One server process; `said(text)` waits for a line on stdout or stderr that contains it."""

    def __init__(self, script: str, *flags: str) -> None:
        self._child = subprocess.Popen(
            [sys.executable, str(PROGRAM), "serve", "--model", "demo", "--port", "0", *flags],
            env={**os.environ, "SCRIPT": script},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self.output = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self.output += line
            self._lines.put(line)
        self._lines.put("")

    def said(self, text: str) -> str:
        while line := self._lines.get(timeout=WAIT_S):
            if text in line:
                return line
        raise AssertionError(f"{text!r} was not said, but: {self.output}")

    def ready(self) -> str:
        """Waits until the server is ready; its URL."""
        return self.said("Strata serves").split()[-1]

    def signal(self, number: int) -> None:
        self._child.send_signal(number)

    def exit_code(self) -> int:
        code = self._child.wait(WAIT_S)
        self._reader.join(WAIT_S)
        return code

    def kill(self) -> None:
        self._child.kill()
        self._child.wait(WAIT_S)


Start = Callable[..., Process]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Process] = []

    def run(script: str, *flags: str) -> Process:
        started.append(Process(script, *flags))
        return started[-1]

    yield run
    for one in started:
        one.kill()


def test_it_says_what_it_does_and_where_to_try_it(start: Start) -> None:
    process = start("ok", "--conversation-cache-cold-dir", "/nowhere/a b", "--api-key", "s3cret")
    assert process.said("loading: model")
    info = process.said("INFO version=")
    assert " model=demo " in info
    assert " conversation-cache-cold-dir=/nowhere/a%20b " in info
    assert " context_tokens=2048 mode=two%20words" in info
    url = process.ready()
    assert process.said(f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -H 'Authorization: Bearer")
    assert process.said("kept in /nowhere/a b")
    assert "s3cret" not in process.output
    assert httpx.get(url + "/v1/models").status_code == 401
    answer = httpx.post(url + CHAT, json={"messages": MESSAGES}, headers={"x-api-key": "s3cret"})
    assert answer.json()["choices"][0]["message"]["content"] == "x"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_in_order(start: Start, number: int) -> None:
    process = start("ok")
    url = process.ready()
    assert httpx.get(url + "/health").status_code == 200
    process.signal(number)
    assert process.exit_code() == 0
    assert process.output.index("stopping") < process.output.index("stop called")
    assert "Traceback" not in process.output


def test_answers_in_progress_are_cut_off_after_the_grace_before_the_server_stops(start: Start) -> None:
    process = start("answers-forever")
    body = {"messages": MESSAGES, "stream": True}
    with httpx.Client(timeout=WAIT_S) as http, http.stream("POST", process.ready() + CHAT, json=body) as response:
        lines = response.iter_lines()
        next(lines)
        process.signal(signal.SIGTERM)
        rest = "".join(lines)
    assert "the server is stopping" in rest
    assert "[DONE]" not in rest
    assert process.exit_code() == 0
    assert process.output.index("turn ended") < process.output.index("stop called")
    assert "Traceback" not in process.output


def test_it_stops_although_http_does_not_end_well(start: Start) -> None:
    process = start("http-fails")
    process.ready()
    process.signal(signal.SIGTERM)
    assert process.exit_code() == 1
    assert "stop called" in process.output and "the network is gone" in process.output


def test_a_second_signal_ends_it_at_once(start: Start) -> None:
    process = start("stops-forever")
    process.ready()
    process.signal(signal.SIGTERM)
    process.said("stop called")
    process.signal(signal.SIGINT)
    assert process.exit_code() == 128 + signal.SIGINT


def test_a_signal_while_loading_ends_it(start: Start) -> None:
    process = start("loads-forever")
    process.said("loading: model")
    process.signal(signal.SIGTERM)
    assert process.exit_code() == 0
    assert "Strata serves" not in process.output
    assert "Traceback" not in process.output


def test_http_says_loading_while_it_loads(start: Start, unused_port: int) -> None:
    process = start("loads-forever", "--port", str(unused_port))
    process.said("loading: model")
    response = httpx.get(f"http://127.0.0.1:{unused_port}/health", timeout=WAIT_S)
    assert response.status_code == 503
    assert "model 50%" in response.json()["error"]["message"]


def test_a_server_that_cannot_start_says_why_in_one_line(start: Start) -> None:
    process = start("fails")
    assert process.exit_code() == 1
    assert "strata: error: model.gguf is damaged: bad magic\n" in process.output
    assert "Traceback" not in process.output


def test_warnings_are_shown(start: Start) -> None:
    process = start("ok", "--conversation-cache-cold-dir", "/d", "--conversation-cache-cold-mib", "0")
    assert "--conversation-cache-cold-mib is 0" in process.said("WARNING")


@pytest.fixture
def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def test_the_descriptor_limit_is_raised() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
