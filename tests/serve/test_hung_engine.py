"""An engine process that lives but does not answer (SIGSTOP): it is noticed, replaced, and holds no shutdown up."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time

import openai
import pytest
from tests.serve.running import RunningServer, alive, paused, wait_for
from tests.serve.test_restart import FIRST, ask, cached, next_turn

CHAT = "/v1/chat/completions"
LONG = {"messages": FIRST, "max_tokens": 1500, "ignore_eos": True}
BRIEF = [{"role": "user", "content": "Hello."}]
IMPATIENT = "tests.serve.impatient"


class Asked:
    """A request on a thread of its own; `begun` is set once something of a streamed answer has come."""

    def __init__(self, server: RunningServer, body: dict[str, object]) -> None:
        self.begun = threading.Event()
        self.status, self.text = 0, ""
        self._server, self._body = server, body
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        with self._server.http.stream("POST", CHAT, json=self._body) as response:
            self.status = response.status_code
            for piece in response.iter_text():
                self.text += piece
                self.begun.set()

    def error(self) -> dict[str, object]:
        """Waits for the end; the answer's error, or the last event's."""
        self._thread.join(60)
        found: dict[str, object] = json.loads(self.text.rstrip().rpartition("data: ")[2])["error"]
        return found


def test_a_stopping_server_answers_every_client_and_ends_in_time(tmp_path):
    with RunningServer(tmp_path / "log", "--parallel=2", cold=tmp_path / "cold", program=IMPATIENT) as server:
        stream, whole = Asked(server, {**LONG, "stream": True}), Asked(server, LONG)
        assert stream.begun.wait(20)
        wait_for(lambda: all(slot["state"] != "idle" for slot in server.status()["slots"]), "two requests")
        engine = server.engine_pid
        with paused(engine):
            began = time.monotonic()
            server.signal(signal.SIGTERM)
            errors = [stream.error(), whole.error()]
            assert server.ended(30) == 0
            assert time.monotonic() - began < 15  # one second for answers, one for slots, five for the engine
        assert [error["code"] for error in errors] == ["stopping", "stopping"]
        assert (stream.status, whole.status) == (200, 503)
        assert "[DONE]" not in stream.text
        assert not alive(engine)
        assert "Traceback" not in server.log()


@pytest.mark.slow
def test_a_save_under_way_ends_with_the_server(tmp_path):
    with RunningServer(tmp_path / "log", "--slot-save-path", str(tmp_path / "saved"), program=IMPATIENT) as server:
        ask(server, FIRST)
        engine = server.engine_pid
        with paused(engine):
            answers: list[tuple[int, str]] = []

            def save() -> None:
                answer = server.http.post("/slots/0?action=save", json={"filename": "a"})
                answers.append((answer.status_code, answer.json()["error"]["code"]))

            saving = threading.Thread(target=save)
            saving.start()
            wait_for(lambda: server.status()["slots"][0]["state"] == "saving", "the save")
            server.signal(signal.SIGTERM)
            assert server.ended(40) == 0
            saving.join(20)
        assert answers == [(503, "stopping")]
        assert "Traceback" not in server.log()


@pytest.mark.slow
def test_what_a_slot_owes_is_given_up_when_the_engine_hangs_at_the_end(tmp_path):
    sessions = f"--slot-save-path={tmp_path / 'saved'}"
    with RunningServer(tmp_path / "log", sessions) as server:
        ask(server, FIRST)
        assert server.http.post("/slots/0?action=save", json={"filename": "a"}).status_code == 200
    with RunningServer(tmp_path / "log", sessions, cold=tmp_path / "cold", program=IMPATIENT) as server:
        # what was restored is parked when it leaves, not before
        assert server.http.post("/slots/0?action=restore", json={"filename": "a"}).status_code == 200
        with paused(server.engine_pid):
            server.signal(signal.SIGTERM)
            assert server.ended(30) == 0
        assert "the engine does not answer" in server.log()
        assert "Traceback" not in server.log()


def test_a_hung_engine_is_replaced_and_what_ram_holds_comes_back(tmp_path):
    flags = ("--engine-timeout-s=2", "--conversation-cache-mib=256", "--conversation-cache-min-free-mib=0")
    with RunningServer(tmp_path / "log", *flags) as server:
        first = ask(server, FIRST)
        server.settled()
        engine = server.engine_pid
        stream = Asked(server, {**LONG, "stream": True})
        assert stream.begun.wait(20)
        with paused(engine):
            error = stream.error()
            assert error["code"] == "engine_restarting"
            assert "did not answer" in str(error["message"])
            server.wait_for_engine_after(engine)
        raw = server.client.chat.completions.with_raw_response.create(
            model="demo", messages=next_turn(first), max_tokens=4
        )
        assert raw.headers["x-strata-cache"].startswith("source=ram;")
        assert cached(raw.parse()) > 0
        assert server.log().count("--engine-timeout-s") == 1


@pytest.mark.slow
def test_an_idle_engine_that_hangs_is_noticed_by_the_next_request(tmp_path):
    with RunningServer(tmp_path / "log", "--engine-timeout-s=2") as server:
        ask(server, FIRST)
        engine = server.engine_pid
        with paused(engine):
            with pytest.raises(openai.InternalServerError, match="did not answer"):
                ask(server, FIRST)
            server.wait_for_engine_after(engine)
        ask(server, FIRST)


def test_an_engine_that_imports_for_longer_than_the_timeout_is_waited_for(tmp_path):
    """As from a slow disk; at the start of the server, and when the engine is replaced."""
    slow = "import sys, time\nif 'strata.engine.worker' in sys.orig_argv: time.sleep(4)\n"
    (tmp_path / "sitecustomize.py").write_text(slow)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    with RunningServer(tmp_path / "log", "--engine-timeout-s=2", extra={"PYTHONPATH": path}) as server:
        ask(server, BRIEF)
        server.wait_for_engine_after(server.kill_engine())
        ask(server, BRIEF)
        assert "--engine-timeout-s" not in server.log()


@pytest.mark.slow
def test_health_tells_of_an_engine_that_does_not_answer(tmp_path):
    with RunningServer(tmp_path / "log", "--engine-timeout-s=0", program=IMPATIENT) as server:
        stream = Asked(server, {**LONG, "stream": True})
        assert stream.begun.wait(20)
        with paused(server.engine_pid):
            wait_for(lambda: not server.healthy(), "/health to say so")
            error = server.http.get("/health").json()["error"]
            assert error["code"] == "unavailable" and "has not answered for" in error["message"]
        wait_for(server.healthy, "/health to be well again")
        with contextlib.suppress(KeyError, ValueError):  # it has no error: the answer goes on to its end
            stream.error()
        assert stream.text.rstrip().endswith("[DONE]")


@pytest.mark.slow
def test_a_machine_that_was_suspended_loses_no_engine(tmp_path):
    with RunningServer(tmp_path / "log", "--engine-timeout-s=1") as server:
        engine = server.engine_pid
        stream = Asked(server, {**LONG, "stream": True})
        assert stream.begun.wait(20)
        with paused(engine), paused(server.pid):
            threading.Event().wait(2.5)
        with contextlib.suppress(KeyError, ValueError):
            stream.error()
        assert stream.text.rstrip().endswith("[DONE]")
        assert server.engine_pid == engine
