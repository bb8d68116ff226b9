"""The real server as a process: start it, talk to it with the official client, kill it or its engine, stop it.

Every wait has a limit and ends as soon as what it waits for is there. The log is kept in a file and shown when a wait
fails.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import openai

START_S = 60.0
STOP_S = 60.0
ANSWER_S = 120.0
SOON_S = 20.0
_POLL_S = 0.01
_URL = re.compile(r"Strata serves .* at (http://\S+)")

T = TypeVar("T")


def wait_for(look: Callable[[], T], what: str, within_s: float = SOON_S) -> T:
    """The first true value of `look`; AssertionError that names `what` when there is none within the limit."""
    deadline = time.monotonic() + within_s
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(_POLL_S)


def command(*flags: str, program: str = "strata.cli.main") -> list[str]:
    """The command line of a server on a free port that starts fast: a small context and no measuring."""
    # Batches of one size whatever the load, and one choice of kernel: greedy replies of two servers can be compared.
    fast = ("--model=demo", "--port=0", "--context=2048", "--flash-attention=on", "--batch-size=64")
    return [sys.executable, "-m", program, "serve", *fast, *flags]


def refusal(*flags: str) -> tuple[int, str]:
    """The exit code and the output of a server that refuses to start."""
    done = subprocess.run(command(*flags), capture_output=True, text=True, timeout=START_S, check=False)
    return done.returncode, done.stdout + done.stderr


class RunningServer:
    """`strata serve` with one slot, unless the flags say otherwise. Leaving it kills what is left.

    `program`: the module that is run instead; `extra`: added to its environment.
    """

    def __init__(
        self,
        log: Path,
        *flags: str,
        cold: Path | None = None,
        keys: Sequence[str] = (),
        program: str = "strata.cli.main",
        ladder: bool = False,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        kept = () if cold is None else (f"--conversation-cache-cold-dir={cold}",)
        self.cold = cold
        self._log = log
        with log.open("ab") as out:
            self._log_from = out.tell()
            self._process = subprocess.Popen(
                command(*kept, *flags, *(f"--api-key={key}" for key in keys), program=program),
                env={**os.environ, "STRATA_RESTORE_LADDER": "1" if ladder else "0", **(extra or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._clients: list[openai.OpenAI] = []
        try:
            self.url = wait_for(self._look_for_url, "the server's address in its log", START_S)
            self.http = httpx.Client(base_url=self.url, timeout=ANSWER_S)
            wait_for(self.healthy, "/health", START_S)
        except BaseException:
            self._end()
            print(self.log())
            raise
        self.client = self.client_with(keys[0] if keys else "none")

    def __repr__(self) -> str:
        return f"RunningServer(pid {self._process.pid}, {self.url})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()
        for client in self._clients:
            client.close()
        self.http.close()
        if kind is not None:
            print(self.log())

    def _look_for_url(self) -> str | None:
        code = self._process.poll()
        assert code is None, f"the server ended with {code}:\n{self.log()}"
        found = _URL.search(self.log())
        return found[1] if found else None

    def _end(self) -> None:
        """Kill the server, and whatever it may have left of its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_S)

    def log(self) -> str:
        """What this server has printed so far."""
        with self._log.open("rb") as log:
            log.seek(self._log_from)
            return log.read().decode(errors="replace")

    # ------------------------------------------------------------------------------------------------------------ ends

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self, number: int) -> None:
        """Send it now, without a word to the server before."""
        self._process.send_signal(number)

    def ended(self, within_s: float = STOP_S) -> int:
        """Wait for the end; the exit code, negative for a signal."""
        return self._process.wait(within_s)

    def stop(self) -> None:
        """SIGTERM, and wait for the orderly end."""
        engine = self.engine_pid
        self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(STOP_S)
        assert code == 0, f"the server ended with {code}:\n{self.log()}"
        wait_for(lambda: not alive(engine), "the end of the engine process")

    def kill9(self) -> None:
        """SIGKILL to the server; wait until its engine has noticed."""
        engine = self.engine_pid
        self._process.kill()
        self._process.wait(STOP_S)
        wait_for(lambda: not alive(engine), "the end of the engine process")

    def kill_engine(self) -> int:
        """SIGKILL to the engine process; its pid."""
        pid = self.engine_pid
        os.kill(pid, signal.SIGKILL)
        return pid

    # ------------------------------------------------------------------------------------------------------------- use

    def client_with(self, key: str) -> openai.OpenAI:
        """The official client, with this API key and no retries."""
        client = openai.OpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0, timeout=ANSWER_S)
        self._clients.append(client)
        return client

    def healthy(self) -> bool:
        return self.http.get("/health").status_code == 200

    def status(self) -> dict[str, Any]:
        key = {"X-Api-Key": self._clients[0].api_key} if self._clients else {}
        answer = self.http.get("/v1/status", headers=key)
        assert answer.status_code == 200, answer.text
        status: dict[str, Any] = answer.json()
        return status

    @property
    def engine_pid(self) -> int:
        pid = self.status()["engine"]["pid"]
        assert isinstance(pid, int)
        return pid

    def wait_for_engine_after(self, pid: int) -> None:
        """Wait until another engine process than `pid` serves."""

        def look() -> bool:
            status = self.status()
            return bool(status["ready"]) and status["engine"]["pid"] not in (None, pid)

        wait_for(look, "a new engine", START_S)

    @property
    def level(self) -> dict[str, Any]:
        """The state of the last level."""
        level: dict[str, Any] = self.status()["levels"][-1]
        return level

    @property
    def counters(self) -> dict[str, Any]:
        """What the cache has counted."""
        counters: dict[str, Any] = self.status()["cache"]["counters"]
        return counters

    def idle(self) -> bool:
        """Whether no request runs, and no park is under way."""
        status = self.status()
        idle = all(slot["state"] == "idle" for slot in status["slots"])
        return idle and not (status["cache"] or {}).get("under_way")

    def settled(self) -> dict[str, Any]:
        """Wait until no request runs and no park is under way; the cold level's state then."""
        wait_for(self.idle, "the end of all requests and parks")
        return self.level


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@contextlib.contextmanager
def paused(pid: int) -> Iterator[None]:
    """The process does nothing meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
