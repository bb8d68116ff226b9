"""Mode "opaque" on the real engine: DeepSeek's sparse attention has a cache that the self-test cannot make sense of.

Whole images are kept then, one per position; everything else is as for other memory. The model is tiny and random, the
caches are llama.cpp's own. What the two have in common with other memory is in test_kept_turns and test_kept_sessions.
"""

from __future__ import annotations

from pathlib import Path

from tests.engine.conftest import MakeContext
from tests.engine.test_kept_turns import FIRST, SECOND, WORDS
from tests.serve.running import RunningServer

from strata.engine.selftest import self_test
from strata.types import BLOCK_BYTES

MODEL = "deepseek32"


def test_the_self_test_fails_and_says_why(make_context: MakeContext) -> None:
    context = make_context(MODEL)
    proof = self_test(context.model, context, [(0, 1), (1, 2)])
    assert proof.mode == "opaque"
    assert "bytes behind the last part" in proof.reason
    assert proof.checkpoint is not None and proof.checkpoint.is_image
    assert (proof.stages, proof.format) == ((), None)
    assert [context.last_position(sequence) for sequence in range(5)] == [-1] * 5


def ask(server: RunningServer, messages: tuple[dict[str, str], ...], max_tokens: int) -> tuple[int, int, str | None]:
    """Tokens that were not read again, tokens of the prompt, and the greedy reply."""
    answer = server.client.chat.completions.create(
        model="any",
        messages=list(messages),  # type: ignore[arg-type]
        max_tokens=max_tokens,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    cached = answer.usage.prompt_tokens_details.cached_tokens or 0
    return cached, answer.usage.prompt_tokens, answer.choices[0].message.content


def images(folder: Path) -> list[int]:
    """Sizes of their files, ascending: the deeper, the larger."""
    assert not list(folder.rglob("*.seg")), "there are no rows"
    return sorted(path.stat().st_size for path in folder.rglob("*.ckpt"))


def test_images_outlive_a_restart_and_are_bounded_and_counted(tiny_paths: dict[str, Path], tmp_path: Path) -> None:
    log, cold = tmp_path / "log", tmp_path / "cold"
    flags = (f"--model={tiny_paths[MODEL]}", "--threads=1", "--prompt-cache=3", "--prompt-cache-root=50")
    with RunningServer(log, *flags, cold=tmp_path / "twin") as server:
        _, first, _ = ask(server, FIRST, 1)  # what the slot holds then is the prompt
        cached, second, expected = ask(server, SECOND, 64)
        assert cached == first
        assert server.counters["restores"] == 0
        server.stop()
    with RunningServer(log, *flags, cold=cold) as server:
        assert server.status()["engine"]["mode"] == "opaque"
        assert ask(server, FIRST, 1)[:2] == (0, first)
        level = server.settled()
        before = images(cold)  # of the root, the frontier and the end
        assert len(before) == server.counters["checkpoints_taken"] == 3
        assert level["used_bytes"] >= sum(before)
        server.stop()
    with RunningServer(log, *flags, cold=cold) as server:
        assert ask(server, SECOND, 64) == (first, second, expected)
        assert (server.counters["restores"], server.counters["restore_failures"]) == (1, 0)
        level = server.settled()
        after = images(cold)
        assert len(after) == 3 and after[0] == before[0] and after[1] > before[2]
        assert level["used_bytes"] >= sum(after)
        server.stop()


def test_an_image_of_several_blocks(tiny_paths: dict[str, Path], tmp_path: Path) -> None:
    log, cold = tmp_path / "log", tmp_path / "cold"
    long = ({"role": "user", "content": WORDS * 108},)
    later = (*long, {"role": "assistant", "content": "It does."}, {"role": "user", "content": "Go on."})
    flags = (f"--model={tiny_paths[MODEL]}", "--threads=1", "--context=4096", "--kv=f32", "--prompt-cache=1")
    with RunningServer(log, *flags, cold=tmp_path / "twin") as server:
        _, first, _ = ask(server, long, 1)
        cached, second, expected = ask(server, later, 64)
        assert cached == first
        server.stop()
    with RunningServer(log, *flags, cold=cold) as server:
        ask(server, long, 1)
        server.settled()
        (size,) = images(cold)
        assert size > BLOCK_BYTES + 4096
        server.stop()
    with RunningServer(log, *flags, cold=cold) as server:
        assert ask(server, later, 64) == (first, second, expected)
        assert (server.counters["restores"], server.counters["restore_failures"]) == (1, 0)
        server.stop()
