"""Real servers in processes of their own, for benchmarks that measure what a client sees: Strata, and its peer."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

START_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What one streamed answer cost and said. `ttft_s`: from sending the request to the first text."""

    ttft_s: float
    text: str
    prompt_tokens: int
    cached_tokens: int
    cache_header: str


class ServerProcess:
    """A started server; `chat` and `status` talk to it over HTTP."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.url = url
        self._process = process
        self._http = httpx.Client(base_url=url, timeout=600)

    def chat(self, messages: list[dict[str, str]], *, max_tokens: int, cache_prompt: bool = True) -> Reply:
        """A greedy streamed chat completion."""
        body = {
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_prompt": cache_prompt,
        }
        began, first_s, pieces, usage = time.perf_counter(), None, [], None
        with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise RuntimeError(f"{response.status_code}: {response.read().decode()}")
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise RuntimeError(chunk["error"])
                usage = chunk.get("usage") or usage
                text = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                if text and first_s is None:
                    first_s = time.perf_counter() - began
                pieces.append(text)
        assert usage is not None and first_s is not None, "the answer was empty"
        return Reply(
            ttft_s=first_s,
            text="".join(pieces),
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            cache_header=response.headers.get("x-strata-cache", ""),
        )

    def status(self) -> dict[str, Any]:
        return dict(self._http.get("/v1/status").json())

    def level(self) -> dict[str, Any]:
        """The status of the last level, once nothing is being parked."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            status = self.status()
            level: dict[str, Any] = status["levels"][-1]
            if not status["cache"]["under_way"]:
                return level
            time.sleep(0.02)
        raise RuntimeError("a park does not end")

    def ready(self) -> bool:
        try:
            return self._http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(timeout=90)


@contextmanager
def serving(*flags: str, model: str = "demo") -> Iterator[ServerProcess]:
    """`strata serve` with these flags, on a free port, until the block ends."""
    with _started("strata.cli.main", "serve", "--model", model, *flags) as server:
        yield server


@contextmanager
def serving_llama(*flags: str) -> Iterator[ServerProcess]:
    """llama-server with the same model and the flags of `benchmarks.llama_server`; it has no `status`."""
    with _started("benchmarks.llama_server", *flags) as server:
        yield server


@contextmanager
def _started(module: str, *arguments: str) -> Iterator[ServerProcess]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", module, *arguments, "--port", str(port)]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        server = ServerProcess(process, f"http://127.0.0.1:{port}")
        try:
            deadline = time.monotonic() + START_LIMIT_S
            while not server.ready():
                if process.poll() is not None or time.monotonic() > deadline:
                    output.seek(0)
                    raise RuntimeError(f"the server did not start:\n{output.read().decode(errors='replace')}")
                time.sleep(0.05)
            yield server
        finally:
            if process.poll() is None:
                server.stop()


def drop_page_cache(folder: Path) -> None:
    """Ask the system to forget the cached pages of every file below `folder`."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
