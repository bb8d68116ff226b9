"""A conversation survives a restart: the real server, the real model, the official client."""

from __future__ import annotations

import pytest
from tests.serve.running import RunningServer, refusal

FACTS = " ".join(f"Fact {i}: drawer {i} of the cabinet holds {i * 7 % 97} brass keys." for i in range(75))
FIRST = [{"role": "user", "content": f"Remember these facts. {FACTS}"}]


def ask(server, messages, *, max_tokens=16, client=None, **extra):
    return (client or server.client).chat.completions.create(
        model="demo", messages=messages, max_tokens=max_tokens, temperature=0, extra_body=extra
    )


def cached(answer):
    return answer.usage.prompt_tokens_details.cached_tokens


def said(answer):
    return answer.choices[0].message.content


def next_turn(answer, text="Which drawer holds most keys?"):
    return [*FIRST, {"role": "assistant", "content": said(answer)}, {"role": "user", "content": text}]


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    """The first answer, and 64 greedy tokens of the next turn, on a server that keeps nothing and is not restarted."""
    with RunningServer(tmp_path_factory.mktemp("twin") / "log") as server:
        first = ask(server, FIRST)
        return said(first), said(ask(server, next_turn(first), max_tokens=64, ignore_eos=True))


@pytest.mark.parametrize("end", ["stop", "kill9"])
def test_the_next_turn_after_a_restart_reads_only_what_is_new(tmp_path, twin, end):
    cold = tmp_path / "cold"
    with RunningServer(tmp_path / "log", cold=cold) as server:
        first = ask(server, FIRST)
        kept = server.settled()["newest"][0]["tokens"]
        assert said(first) == twin[0] and kept > 1400
        getattr(server, end)()
    with RunningServer(tmp_path / "log", cold=cold) as server:
        raw = server.client.chat.completions.with_raw_response.create(
            model="demo",
            messages=next_turn(first),
            max_tokens=64,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        answer = raw.parse()
        assert cached(answer) == kept
        assert raw.headers["x-strata-cache"].startswith(f"source=cold; reused={kept}/")
        assert answer.usage.completion_tokens == 64 and said(answer) == twin[1]


def test_edits_branches_siblings_and_namespaces_after_a_restart(tmp_path):
    cold = tmp_path / "cold"
    with RunningServer(tmp_path / "log", cold=cold, keys=["alpha", "beta"]) as server:
        first = ask(server, FIRST)
        assert cached(ask(server, FIRST, client=server.client_with("beta"))) == 0
        ask(server, next_turn(first))
        before = server.settled()
        server.stop()
    with RunningServer(tmp_path / "log", cold=cold, keys=["alpha", "beta"]) as server:
        kept = server.level["newest"]
        edited = ask(server, next_turn(first, "Which drawer holds fewest keys?"))
        assert cached(edited) > 0.95 * edited.usage.prompt_tokens
        sibling = ask(server, [{"role": "user", "content": FIRST[0]["content"] + " Then stop."}])
        assert cached(sibling) > 0.95 * sibling.usage.prompt_tokens
        again = ask(server, next_turn(first))  # the old branch is still there
        assert 0.97 * again.usage.prompt_tokens < cached(again) < again.usage.prompt_tokens
        grown = server.settled()["used_bytes"] - before["used_bytes"]
        assert grown < before["used_bytes"] / 2, "branches share their segments"
        strangers = [m | {"content": m["content"].replace("drawer", "shelf")} for m in FIRST]
        assert cached(ask(server, strangers)) < 100
        assert {c["conversation"] for c in kept} <= {c["conversation"] for c in server.level["newest"]}


@pytest.mark.slow
def test_cache_prompt_false_leaves_nothing_and_reuses_nothing(tmp_path):
    with RunningServer(tmp_path / "log", cold=tmp_path / "cold") as server:
        ask(server, FIRST)
        before = server.settled()
        answer = ask(server, FIRST, cache_prompt=False)
        after = server.settled()
        assert cached(answer) == 0
        assert (before["conversations"], before["used_bytes"]) == (after["conversations"], after["used_bytes"])
        repeat = ask(server, FIRST)  # the slot was given up, the disk was not
        assert 0 < cached(repeat) < repeat.usage.prompt_tokens


def test_bad_directories_and_models_are_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    for flag, name in [
        ("--conversation-cache-cold-dir", "file"),
        ("--conversation-cache-cold-dir", "link"),
        ("--model", "missing.gguf"),
        ("--model", "bad.gguf"),
    ]:
        code, output = refusal(f"{flag}={tmp_path / name}")
        assert code != 0 and name in output and "Traceback" not in output, output
    code, output = refusal("--conversation-cache-cold-dri=x")
    assert code == 2 and "--conversation-cache-cold-dir" in output


def test_a_second_server_on_the_directory_is_refused_and_told_who_holds_it(tmp_path):
    cold = tmp_path / "cold"
    with RunningServer(tmp_path / "log", cold=cold) as server:
        code, output = refusal(f"--conversation-cache-cold-dir={cold}")
        assert code != 0 and str(server._process.pid) in output and "Traceback" not in output
        assert ask(server, [{"role": "user", "content": "Hi"}]).usage.prompt_tokens
