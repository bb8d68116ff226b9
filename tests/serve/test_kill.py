"""kill -9 in the middle of parking or of a reply: nothing acknowledged is lost, nothing torn served, nothing deleted.

Acknowledged is what /v1/status lists: a conversation is in it only once its manifest is durable.
"""

from __future__ import annotations

import random
import time

import pytest
from tests.serve.running import RunningServer
from tests.serve.test_restart import ask, cached, said

from strata.store.format import decode_manifest
from strata.store.level import Level

SEED = 20261130
SERVER_KILLS = 12


def prompt(i):
    return [{"role": "user", "content": f"Note {i}. " + f"Item {i} of the list is number {i}; keep it. " * 30}]


def acknowledged(server):
    return {c["conversation"]: c["tokens"] for c in server.level["newest"]}


def verify(cold):
    """Every block of every manifest has the right digest; returns the tokens held, by conversation."""
    identities = {decode_manifest(path.read_bytes()).identity for path in cold.glob("*.meta")}
    found: dict[str, int] = {}
    level = Level.open(cold)
    try:
        for identity in identities:
            scan = level.scan(identity)
            assert not scan.stale, scan.stale
            for stored in scan.manifests:
                manifest = stored.manifest
                for key in manifest.keys:
                    header = level.read_header(key, 0)
                    for index, block in enumerate(header.blocks):
                        level.read_block(header, index, memoryview(bytearray(block.length)))
                name = manifest.conversation.hex()[:12]
                found[name] = max(found.get(name, 0), manifest.n_tokens)
        assert level.used_bytes == level.usage()
    finally:
        level.close()
    return found


@pytest.mark.slow
def test_the_server_killed_while_it_parks(tmp_path):
    rng, cold = random.Random(SEED), tmp_path / "cold"
    promised: dict[str, int] = {}
    for i in range(SERVER_KILLS):
        with RunningServer(tmp_path / "log", cold=cold) as server:
            assert promised.items() <= acknowledged(server).items(), f"lost after kill {i}, seed {SEED}"
            answer = ask(server, prompt(i), max_tokens=2)
            if i % 3 == 2:
                ask(
                    server,
                    [
                        *prompt(i),
                        {"role": "assistant", "content": said(answer)},
                        {"role": "user", "content": "And then? " * 40},
                    ],
                    max_tokens=2,
                )
            if i % 3 == 1:  # killed during a reply, while the park before it may still go on
                body = {"messages": prompt(100 + i), "max_tokens": 400, "stream": True, "ignore_eos": True}
                with server.http.stream("POST", "/v1/chat/completions", json=body) as reply:
                    next(reply.iter_raw())
                    time.sleep(rng.uniform(0, 0.3))
                    promised = acknowledged(server)
                    server.kill9()
            else:
                time.sleep(rng.uniform(0, 0.12))
                promised = acknowledged(server)
                time.sleep(rng.uniform(0, 0.02))
                server.kill9()
        found = verify(cold)
        assert all(found.get(name, 0) >= tokens for name, tokens in promised.items()), f"kill {i}, seed {SEED}"
        promised = found
    with RunningServer(tmp_path / "log", cold=cold) as server:
        answers = [ask(server, prompt(i), max_tokens=2) for i in range(SERVER_KILLS)]
        assert all(cached(answer) < answer.usage.prompt_tokens for answer in answers)
        warm = sum(cached(answer) > 0.9 * answer.usage.prompt_tokens for answer in answers)
        assert warm >= len(promised) > 0
        assert server.counters["restore_failures"] == 0


@pytest.mark.parametrize("round_", range(3))
def test_the_engine_killed_while_it_parks(tmp_path, round_):
    """Three engines a server: more within a minute would rightly stop the restarts."""
    rng, cold = random.Random(SEED + round_), tmp_path / "cold"
    with RunningServer(tmp_path / "log", "--parallel=2", cold=cold) as server:
        for i in range(3):
            before = acknowledged(server)
            ask(server, prompt(i), max_tokens=2)
            time.sleep(rng.uniform(0, 0.05))
            pid = server.kill_engine()
            server.wait_for_engine_after(pid)
            assert before.items() <= acknowledged(server).items(), f"kill {i}, seed {SEED + round_}"
        server.settled()
        last = acknowledged(server)
        answer = ask(server, prompt(9), max_tokens=2)
        assert said(answer) is not None
        server.stop()
    found = verify(cold)
    assert all(found.get(name, 0) >= tokens for name, tokens in last.items())
