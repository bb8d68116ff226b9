"""The real server with a split pool: four clients at once, restarts under either kind, forks, sessions, and auto."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.engine.tiny_models import write_tiny_models
from tests.serve.running import RunningServer, refusal

from strata.serve.wiring import find_model
from strata.store.names import CHOICES_NAME

# Without flash attention where the cells lie does not change what is written.
FLAGS = ("--parallel=4", "--context=1024", "--flash-attention=off", "--threads=1")
RAM = ("--conversation-cache-mib=256", "--conversation-cache-min-free-mib=0")
OTHER = {"split": "unified", "unified": "split"}


def facts(client: int, n: int = 12) -> str:
    told = " ".join(f"Drawer {i} of cabinet {client} holds {(i + client) * 7 % 97} keys." for i in range(n))
    return f"The secret word of client {client} is ZEBRA{client}{client}. {told}"


def ask(server: RunningServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Text, cached tokens, and where they came from."""
    answer = server.http.post(path, json={"temperature": 0, "max_tokens": 24, "ignore_eos": True, **body})
    assert answer.status_code == 200, answer.text
    choice, usage = answer.json()["choices"][0], answer.json()["usage"]
    return {
        "text": choice["message"]["content"] if "message" in choice else choice["text"],
        "prompt": usage["prompt_tokens"],
        "cached": usage["prompt_tokens_details"]["cached_tokens"],
        "cache": answer.headers["x-strata-cache"],
    }


def complete(server: RunningServer, prompt: str, n: int = 24) -> dict[str, Any]:
    return ask(server, "/v1/completions", {"prompt": prompt, "max_tokens": n})


def chat(server: RunningServer, client: int, turns: int) -> dict[str, Any]:
    """A client's turn of that number. The replies it sends back are its own: noise may not give the same tokens."""
    messages = [{"role": "user", "content": facts(client)}]
    for i in range(1, turns):
        messages += [{"role": "assistant", "content": f"So it does, {i} times."}, {"role": "user", "content": "Go on."}]
    return ask(server, "/v1/chat/completions", {"messages": messages})


def clients(server: RunningServer, turns: int) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda client: chat(server, client, turns), range(1, 5)))


def model_flag(name: str, folder: Path) -> str:
    path = name if name == "demo" else str(write_tiny_models(folder, vocabulary_of=find_model("demo"))[name])
    return f"--model={path}"


@pytest.mark.parametrize("pool", OTHER)
@pytest.mark.parametrize("model", [pytest.param("demo", marks=pytest.mark.slow), "gemma3", "lfm2", "mamba"])
def test_four_clients_and_a_restart_under_the_other_kind(tmp_path: Path, model: str, pool: str) -> None:
    flags, cold = (*FLAGS, model_flag(model, tmp_path), *RAM), tmp_path / "cold"
    with RunningServer(tmp_path / "log", *flags, f"--pool={pool}", cold=cold) as server:
        kind = server.status()["engine"]
        assert kind["pool"] == ("unified" if model == "mamba" else pool)
        assert all(reply["cached"] < 60 for reply in clients(server, 1)), "at most the template's words are shared"
        second = clients(server, 2)
        assert all(reply["cached"] > 0.8 * reply["prompt"] for reply in second), [reply["cache"] for reply in second]
        for client, reply in enumerate(second, 1):
            others = [f"ZEBRA{other}" for other in range(1, 5) if other != client]
            assert not any(word in reply["text"] for word in others), reply["text"]
        server.settled()
        assert server.counters["discards"] == 0
        server.stop()
    with RunningServer(tmp_path / "log", *flags, f"--pool={OTHER[pool]}", cold=cold) as server:
        assert server.status()["engine"]["identity"] == kind["identity"]
        third = clients(server, 3)
        assert all(reply["cache"].startswith("source=cold") for reply in third), [reply["cache"] for reply in third]
        assert all(reply["cached"] > 0.8 * reply["prompt"] for reply in third)
        server.wait_for_engine_after(server.kill_engine())
        again = clients(server, 3)
        assert all(reply["cached"] > 0.8 * reply["prompt"] for reply in again), "RAM outlives the engine"


@pytest.mark.parametrize("pool", OTHER)
def test_greedy_tokens_are_those_of_a_twin_that_was_never_parked(tmp_path: Path, pool: str) -> None:
    flags = (*FLAGS, "--model=demo", "--parallel=2")
    prompt = facts(1, 30)
    with RunningServer(tmp_path / "twin", *flags, f"--pool={OTHER[pool]}") as server:
        first = complete(server, prompt, 8)
        again = prompt + first["text"] + " Which drawer holds most?"
        wanted = complete(server, again, 64)
        assert wanted["cache"].startswith("source=live")
    with RunningServer(tmp_path / "log", *flags, f"--pool={pool}", cold=tmp_path / "cold") as server:
        assert complete(server, prompt, 8)["text"] == first["text"]
        server.settled()
        server.stop()
    with RunningServer(tmp_path / "log", *flags, f"--pool={OTHER[pool]}", cold=tmp_path / "cold") as server:
        found = complete(server, again, 64)
        assert found["cache"].startswith("source=cold") and found["cached"] >= wanted["cached"] - 1
        assert found["text"] == wanted["text"]


def test_a_prefix_of_another_slot_is_copied(tmp_path: Path) -> None:
    """Two conversations behind the same text, without any cache: the second reads only its own part."""
    shared = facts(1, 30)
    with RunningServer(tmp_path / "log", *FLAGS, "--pool=split", "--parallel=3") as server:
        one = complete(server, shared + " The first question?")
        two = complete(server, shared + " Another one, quite different?")
        assert two["cache"].startswith("source=fork") and two["cached"] > 0.9 * one["prompt"]
        again = complete(server, shared + " The first question?" + one["text"] + " Yes?")
        assert again["cached"] > 0.9 * again["prompt"], "the copy took nothing from its source"


@pytest.mark.parametrize("pool", OTHER)
def test_a_session_saved_under_one_kind_is_restored_under_the_other(tmp_path: Path, pool: str) -> None:
    flags = (*FLAGS, "--model=demo", f"--slot-save-path={tmp_path / 'sessions'}", "--session-min-free-mib=0")
    prompt = facts(2, 20)
    with RunningServer(tmp_path / "log", *flags, f"--pool={pool}") as server:
        first = complete(server, prompt)
        saved = server.http.post("/slots/0?action=save", json={"filename": "talk"})
        if saved.json().get("n_saved", 0) == 0:
            pytest.fail(saved.text)
        server.stop()
    with RunningServer(tmp_path / "log", *flags, f"--pool={OTHER[pool]}") as server:
        restored = server.http.post("/slots/2?action=restore", json={"filename": "talk"}).json()
        assert restored["n_restored"] == saved.json()["n_saved"]
        reply = complete(server, prompt + first["text"] + " Why?")
        assert reply["cache"].startswith("source=session") and reply["cached"] >= restored["n_restored"] - 1
        saved_again = server.http.post("/slots/2?action=save", json={"filename": "again"}).json()
        assert saved_again["n_saved"] > restored["n_restored"]


def test_auto_is_measured_once_for_a_directory(tmp_path: Path) -> None:
    reasons = []
    for _ in range(2):
        with RunningServer(tmp_path / "log", *FLAGS, "--pool=auto", cold=tmp_path / "cold") as server:
            reasons.append((server.status()["engine"]["pool"], server.status()["engine"]["pool_reason"]))
            server.stop()
    assert reasons[0][1].startswith("measured: all unified")
    assert reasons[1] == (reasons[0][0], "remembered from an earlier start")
    kept = json.loads(next((tmp_path / "cold").rglob(CHOICES_NAME)).read_text())
    assert [value for key, value in kept.items() if key.startswith("pool: ")] == [reasons[0][0] == "split"]


def test_what_does_not_go_together_is_said(tmp_path: Path) -> None:
    code, said = refusal("--parallel=2", "--pool=split", "--pool-cells=600")
    assert code == 2 and "--pool split" in said and "--pool-cells 600" in said
