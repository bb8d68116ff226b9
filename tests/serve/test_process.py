"""The server as a process of a service: signals to its whole group, and what it says when it is ready."""

from __future__ import annotations

import os
import signal
import threading

import httpx
import pytest
from tests.serve.running import RunningServer, alive, wait_for
from tests.serve.test_restart import FIRST

SHORT = [{"role": "user", "content": "Count the brass keys in the drawers of the cabinet, one by one. " * 4}]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
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
