"""What a running server survives: a dead engine, clients that leave, damaged files, a disk that is full."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading

import httpx
import openai
import pytest
from tests.serve.running import RunningServer, wait_for
from tests.serve.test_restart import FIRST, ask, cached, next_turn, said

OTHER = [{"role": "user", "content": "Count from one to fifty in words, slowly. " * 30}]


def test_a_killed_engine_fails_the_request_clearly_and_comes_back_with_everything_parked(tmp_path):
    with RunningServer(tmp_path / "log", cold=tmp_path / "cold") as server:
        first = ask(server, FIRST)
        kept = server.settled()["newest"][0]["tokens"]
        stream = server.client.chat.completions.create(
            model="demo", messages=OTHER, max_tokens=500, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        pid = server.kill_engine()
        with pytest.raises((openai.APIError, httpx.HTTPError), match="engine"):
            for _ in stream:
                pass
        server.wait_for_engine_after(pid)
        answer = ask(server, next_turn(first))
        assert cached(answer) == kept
        assert server.status()["engine"]["generation"] == 2


def test_a_client_that_leaves_frees_its_slot_and_the_next_request_is_right(tmp_path):
    with RunningServer(tmp_path / "log", cold=tmp_path / "cold") as server:
        expected = said(ask(server, FIRST))
        for messages in (OTHER, [{"role": "user", "content": "Write. " * 1200}]):  # leaves while writing, while reading
            body = {"messages": messages, "max_tokens": 800, "stream": True, "ignore_eos": True}
            with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
                next(response.iter_raw())
            wait_for(server.idle, "the slot to be idle", 5)
        assert said(ask(server, FIRST, cache_prompt=False)) == expected


def test_eight_clients_on_two_slots_get_their_own_answers(tmp_path):
    with RunningServer(tmp_path / "log", "--parallel=2", cold=tmp_path / "cold") as server:
        words = ["lantern", "marble", "orchid", "pepper", "quartz", "saddle", "thimble", "velvet"]
        answers: dict[str, str] = {}

        def talk(word):
            messages = [{"role": "user", "content": f"The secret word is {word}. Repeat the secret word: {word}."}]
            for _ in range(2):
                answer = ask(server, messages)
                messages += [
                    {"role": "assistant", "content": said(answer)},
                    {"role": "user", "content": f"Say the secret word {word} again."},
                ]
                answers[word] = answers.get(word, "") + said(answer)

        threads = [threading.Thread(target=talk, args=(word,)) for word in words]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert sorted(answers) == words
        for word, text in answers.items():
            assert not [other for other in words if other != word and other in text.lower()]
        level = server.settled()
        assert level["conversations"] == 8 and server.counters["refused"] == 0


def test_a_prefix_shared_with_a_running_request_is_forked(tmp_path):
    with RunningServer(tmp_path / "log", "--parallel=2") as server:
        stream = server.client.chat.completions.create(
            model="demo", messages=FIRST, max_tokens=300, stream=True, extra_body={"ignore_eos": True}
        )
        pieces = iter(stream)
        for _ in range(3):
            next(pieces)
        child = [{"role": "user", "content": FIRST[0]["content"] + " You are the helper."}]
        raw = server.client.chat.completions.with_raw_response.create(model="demo", messages=child, max_tokens=4)
        assert raw.headers["x-strata-cache"].startswith("source=fork;")
        assert cached(raw.parse()) > 0.95 * raw.parse().usage.prompt_tokens
        assert sum(1 for _ in pieces) > 200


DAMAGE = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "zero length": lambda path: os.truncate(path, 0),
    "flipped bit in the payload": lambda path: flip(path, path.stat().st_size // 2),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "gone": lambda path: path.unlink(),
}


def flip(path, at):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A directory with one conversation, its first answer, and the right next answer."""
    folder = tmp_path_factory.mktemp("stored")
    with RunningServer(folder / "log", cold=folder / "cold") as server:
        first = ask(server, FIRST)
        server.settled()
        server.stop()
    shutil.copytree(folder / "cold", folder / "copy")
    with RunningServer(folder / "log", cold=folder / "copy") as server:
        answer = ask(server, next_turn(first), max_tokens=4)
    return folder / "cold", first, cached(answer), said(answer)


@pytest.mark.parametrize("what", ["segment", pytest.param("manifest", marks=pytest.mark.slow)])
def test_damaged_files_cost_a_reading_and_nothing_else(tmp_path, stored, what):
    source, first, kept, expected = stored
    for kind, damage in DAMAGE.items():
        cold = tmp_path / kind.replace(" ", "-")
        shutil.copytree(source, cold)
        victim = largest_middle(cold) if what == "segment" else next(cold.glob("*.meta"))
        damage(victim)
        names = {path.relative_to(cold) for path in cold.rglob("*")}
        with RunningServer(tmp_path / "log", cold=cold, ladder=True) as server:
            started = {path.relative_to(cold) for path in cold.rglob("*")}
            assert started >= names, "the start deletes nothing"
            answer = ask(server, next_turn(first), max_tokens=4)
            assert said(answer) == expected, kind
            assert cached(answer) < kept, kind
            assert what == "manifest" or cached(answer) >= 512, kind
            server.settled()
            repeat = ask(server, next_turn(first), max_tokens=4)
            assert 0 < cached(repeat) < repeat.usage.prompt_tokens
            server.stop()
        assert kind in ("gone", "a pipe") or what == "manifest" or list(victim.parent.glob(f"{victim.name}*.bad")), kind


def largest_middle(cold):
    """The third full segment by position: read the chain out of the manifest."""
    from strata.store.format import decode_manifest
    from strata.store.names import segment_path

    manifest = decode_manifest(next(cold.glob("*.meta")).read_bytes())
    return cold / segment_path(manifest.keys[2], 0)


def test_a_full_disk_costs_nothing_but_the_park(tmp_path):
    cold = tmp_path / "small"
    cold.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(cold)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small filesystem here: {mounted.stderr.decode().strip()}")
    try:
        with RunningServer(tmp_path / "log", cold=cold) as server:
            assert said(ask(server, FIRST))
            level = server.settled()
            assert level["writer"]["state"].startswith("failing") and server.counters["refused"] == 1
            assert not list(cold.rglob("*.tmp")) and not list(cold.glob("*.meta"))
            subprocess.run(["mount", "-o", "remount,size=200m", str(cold)], check=True)
            wait_for(lambda: server.level["writer"]["state"] == "ok", "the space to be seen")
            ask(server, next_turn(ask(server, FIRST)))
            level = server.settled()
            assert level["writer"]["state"] == "ok" and level["conversations"] >= 1
    finally:
        subprocess.run(["umount", "-l", str(cold)], check=False)
