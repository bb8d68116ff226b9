"""The server as a process: signals to its whole group, what it says when it is ready, and an end that nobody hears."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import subprocess
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from tests.serve.running import START_S, STOP_S, RunningServer, alive, command, wait_for
from tests.serve.test_restart import FIRST

SHORT = [{"role": "user", "content": "Count the brass keys in the drawers of the cabinet, one by one. " * 4}]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_whole_group_lets_the_answer_in_progress_end(tmp_path, number):
    """systemd and a terminal's Ctrl-C signal the engine process too; it leaves the end to the front."""
    with RunningServer(tmp_path / "log", cold=tmp_path / "cold") as server:
        engine = server.engine_pid
        stream = server.client.chat.completions.create(
            model="demo", messages=SHORT, max_tokens=32, stream=True, extra_body={"ignore_eos": True}
        )
        chunks = [next(chunk for chunk in stream if chunk.choices[0].delta.content)]
        os.killpg(server.pid, number)
        chunks += stream
        assert chunks[-1].choices[0].finish_reason == "length"
        assert server.ended() == 0
        assert not alive(engine)
        assert "INFO kept 1 conversations; parked 1" in server.log()
        assert "Traceback" not in server.log() and "new engine" not in server.log()


@pytest.mark.parametrize("second", [signal.SIGHUP, signal.SIGTERM])
def test_what_follows_a_hangup_ends_nothing_at_once(tmp_path, second):
    """Kernel and shell each send one when a terminal is closed, and the manager of its session a SIGTERM."""
    with RunningServer(tmp_path / "log", cold=tmp_path / "cold") as server:
        stream = server.client.chat.completions.create(
            model="demo", messages=SHORT, max_tokens=200, stream=True, extra_body={"ignore_eos": True}
        )
        chunks = [next(chunk for chunk in stream if chunk.choices[0].delta.content)]
        os.killpg(server.pid, signal.SIGHUP)
        wait_for(lambda: "stopping" in server.log(), "the first signal to be taken")
        os.killpg(server.pid, second)
        chunks += stream
        assert chunks[-1].choices[0].finish_reason == "length"
        assert server.ended() == 0
        assert "INFO kept 1 conversations; parked 1" in server.log()


def test_a_hangup_that_is_ignored_stays_so(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does; the server inherits it
    try:
        with RunningServer(tmp_path / "log") as server:
            os.killpg(server.pid, signal.SIGHUP)
            server.client.chat.completions.create(model="demo", messages=SHORT, max_tokens=4)
            server.stop()
        assert server.log().count("stopping") == 1
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_signal_to_the_whole_group_ends_both_at_once(tmp_path):
    with RunningServer(tmp_path / "log", cold=tmp_path / "cold") as server:
        engine = server.engine_pid
        body = {"messages": FIRST, "max_tokens": 1500, "ignore_eos": True, "stream": True}
        begun = threading.Event()

        def talk() -> None:
            chat = server.http.stream("POST", "/v1/chat/completions", json=body)
            with pytest.raises(httpx.HTTPError), chat as answer:
                for _ in answer.iter_raw():
                    begun.set()

        client = threading.Thread(target=talk)
        client.start()
        assert begun.wait(20)
        os.killpg(server.pid, signal.SIGTERM)
        wait_for(lambda: "stopping" in server.log(), "the first signal to be taken")
        os.killpg(server.pid, signal.SIGTERM)
        assert server.ended(5) == 128 + signal.SIGTERM
        client.join(20)
        wait_for(lambda: not alive(engine), "the end of the engine process", 5)


def test_it_names_every_folder_that_it_writes_to_and_no_other(tmp_path):
    folders = {name: tmp_path / name for name in ("warm", "cold", "archive", "prompts", "saved")}
    flags = (
        f"--conversation-cache-warm-dir={folders['warm']}",
        "--conversation-cache-warm-mib=64",
        "--conversation-cache-archive-mode=ids",
        f"--conversation-cache-archive-dir={folders['archive']}",
        "--system-prompt-cache",
        f"--system-prompt-cache-dir={folders['prompts']}",
        f"--slot-save-path={folders['saved']}",
    )
    with RunningServer(tmp_path / "log", *flags, cold=folders["cold"]) as server:
        said_lines = server.log().splitlines()
        assert [line for line in said_lines if line.endswith(tuple(map(str, folders.values())))] == [
            f"Conversations are kept in {folders['warm']}",
            f"and, when that is full, in {folders['cold']}",
            f"what they drop goes to {folders['archive']}",
            f"System prompts are kept in {folders['prompts']}",
            f"Sessions that are saved lie in {folders['saved']}",
        ]
        assert any(line.startswith("Stop the server (Ctrl-C)") for line in said_lines)
        assert all(folder.is_dir() for folder in folders.values())
    with RunningServer(tmp_path / "bare", "--conversation-cache-mib=64") as server:
        assert "kept in" not in server.log() and "Stop the server" not in server.log()


def test_the_one_level_is_named_when_there_is_no_other(tmp_path):
    with RunningServer(tmp_path / "log", cold=tmp_path / "cold") as server:
        assert f"Conversations are kept in {tmp_path / 'cold'}\n" in server.log()
        assert "when that is full" not in server.log()


# ------------------------------------------------------------------------------------------ an output that nobody hears


class Unheard:
    """`strata serve` that writes all it says to `output`, and keeps what it parks in memory until it ends.

    `said`: the other end of `output`, if it has one. `prepare` is called in the new process before it is the server.
    """

    def __init__(self, cold: Path, output: int, said: int | None, prepare: Callable[[], object] | None) -> None:
        ram = ("--conversation-cache-mib=256", "--conversation-cache-min-free-mib=0")
        self._said = said
        self._cold = cold
        self.process = subprocess.Popen(
            command(*ram, "--conversation-cache-spill-on=evict", f"--conversation-cache-cold-dir={cold}"),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=prepare,
        )
        os.close(output)

    def talk(self) -> None:
        """Wait until it serves, and have a conversation that only memory has afterwards."""
        wait_for(self._serves, "/health", START_S)
        answer = httpx.post(self._url() + "/v1/chat/completions", json={"messages": SHORT, "max_tokens": 4}, timeout=60)
        assert answer.status_code == 200
        assert self.manifests() == 0

    def manifests(self) -> int:
        return len(list(self._cold.glob("*.meta")))

    def _url(self) -> str:
        """Asked of the system, because nobody may hear it from the server."""
        sockets = psutil.Process(self.process.pid).net_connections("inet")
        return next((f"http://127.0.0.1:{s.laddr.port}" for s in sockets if s.status == psutil.CONN_LISTEN), "")

    def _serves(self) -> bool:
        assert self.process.poll() is None, f"it ended with {self.process.returncode}"
        if self._said is not None:
            with contextlib.suppress(BlockingIOError):  # a pipe or terminal that is full would hold the server up
                os.read(self._said, 1 << 16)
        with contextlib.suppress(httpx.TransportError, psutil.Error):  # it does not listen yet, or has just ended
            return httpx.get(self._url() + "/health").status_code == 200
        return False


@contextlib.contextmanager
def unheard(
    cold: Path, output: int, said: int | None = None, prepare: Callable[[], object] | None = None
) -> Iterator[Unheard]:
    if said is not None:
        os.set_blocking(said, False)
    server = Unheard(cold, output, said, prepare)
    try:
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait(STOP_S)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("prepare", [None, lambda: os.closerange(1, 3)], ids=["full", "closed"])
def test_a_server_that_can_say_nothing_starts_and_keeps_its_conversations(tmp_path, prepare):
    """`>/dev/full 2>&1` and `>&- 2>&-`."""
    with unheard(tmp_path / "cold", os.open("/dev/full", os.O_WRONLY), prepare=prepare) as server:
        server.talk()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(STOP_S) == 0
        assert server.manifests() == 1


def test_a_reader_of_the_log_that_is_gone_costs_no_conversation(tmp_path):
    """`strata serve 2>&1 | tee log`: Ctrl-C ends tee too."""
    said, output = os.pipe()
    with unheard(tmp_path / "cold", output, said) as server:
        server.talk()
        os.close(said)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(STOP_S) == 0
        assert server.manifests() == 1


def test_a_terminal_that_is_closed_costs_no_conversation(tmp_path):
    said, output = pty.openpty()
    with unheard(tmp_path / "cold", output, said, lambda: fcntl.ioctl(1, termios.TIOCSCTTY, 0)) as server:
        server.talk()
        os.close(said)  # from here on nothing but the kernel tells the server
        assert server.process.wait(STOP_S) == 0
        assert server.manifests() == 1


def test_a_terminal_that_goes_while_bars_are_shown_on_it_does_not_stop_the_start(tmp_path):
    """It is not the server's own here, so nothing tells the server: its writes fail."""
    said, output = pty.openpty()
    with unheard(tmp_path / "cold", output) as server:
        shown = b""
        while b"loading" not in shown:
            shown += os.read(said, 1 << 16)
        os.close(said)
        server.talk()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(STOP_S) == 0
        assert server.manifests() == 1
