"""A real server whose pool holds 1.3 contexts, and four clients with long replies: all end, nothing leaks."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.engine.tiny_models import write_tiny_models
from tests.serve.running import RunningServer, wait_for

from strata.serve.wiring import find_model

CONTEXT, CELLS, REPLY = 590, 768, 340  # with the margin 1280 cells: four requests that fit at first outgrow them
FLAGS = ("--parallel=4", f"--context={CONTEXT}", f"--pool-cells={CELLS}", "--threads=1")


def stream(server: RunningServer, n: int) -> dict[str, Any]:
    """A reply as long as the context allows: its text, comments, usage, errors."""
    body = {
        "prompt": f"The secret word of client {n} is ZEBRA{n}{n}. " + f"Client {n} counts sheep. " * 4,
        "temperature": 0,
        "max_tokens": REPLY,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    out: dict[str, Any] = {"text": "", "parked": 0, "aside": 0, "usage": None, "reason": None, "done": False}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            out["aside"] += line == ": parked, waits for room" and out["text"] != ""
            out["parked"] += line == ": parked, waits for room"
            out["done"] |= line == "data: [DONE]"
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            assert "error" not in chunk, chunk
            out["usage"] = chunk.get("usage") or out["usage"]
            for choice in chunk["choices"]:
                out["text"] += choice["text"]
                out["reason"] = choice["finish_reason"] or out["reason"]
    return out


@pytest.mark.parametrize(("model", "cache"), [("qwen2vl", "off"), ("demo", "on")])
def test_four_clients_in_a_pool_of_one_and_a_third_contexts(tmp_path: Path, model: str, cache: str) -> None:
    path = model
    if model != "demo":
        path = str(write_tiny_models(tmp_path, vocabulary_of=find_model("demo"))[model])
    ram = ("--conversation-cache-mib=256", "--conversation-cache-min-free-mib=0") if cache == "on" else ()
    cold = tmp_path / "cold" if cache == "on" else None
    with RunningServer(tmp_path / "log", *FLAGS, f"--model={path}", *ram, cold=cold) as server:
        with ThreadPoolExecutor(4) as clients:
            replies = list(clients.map(lambda n: stream(server, n), range(1, 5)))
        assert sum(reply["aside"] for reply in replies) >= 1, "nobody had to step aside in the middle of a reply"
        for n, reply in enumerate(replies, 1):
            usage = reply["usage"]
            assert reply["done"] and reply["reason"] == "length"
            assert usage["completion_tokens"] == min(REPLY, CONTEXT - usage["prompt_tokens"])
            others = [f"ZEBRA{other}" for other in range(1, 5) if other != n]
            assert not any(word in reply["text"] for word in others), reply["text"]
        wait_for(lambda: all(slot["state"] == "idle" for slot in server.status()["slots"]), "idle slots")
        assert server.status()["engine"]["generation"] == 1 and server.status()["waiting"] == 0
        status = server.status()
        assert status["pool"]["stepped_aside"] >= 1 and status["pool"]["waiting"] == status["pool"]["running"] == 0
        assert sum(slot["tokens"] for slot in status["slots"]) <= status["engine"]["pool_cells"]
        if cache == "on":
            assert status["cache"]["counters"]["restores"] >= 1, "who stepped aside was restored"
        alone = stream(server, 1)
        assert alone["parked"] == 0 and alone["usage"]["completion_tokens"] == replies[0]["usage"]["completion_tokens"]


def test_a_prompt_that_cannot_fit_the_pool_is_refused_before_it_starts(tmp_path: Path) -> None:
    flags = ("--parallel=2", "--context=512", "--pool-cells=300")
    with RunningServer(tmp_path / "log", *flags) as server:
        answer = server.http.post("/v1/completions", json={"prompt": "one two three " * 200, "max_tokens": 5})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["code"] == "context_length_exceeded"
        assert "K/V pool of 300 tokens" in error["message"] and "--pool-cells" in error["message"]
        assert server.http.post("/v1/completions", json={"prompt": "one two", "max_tokens": 5}).status_code == 200
