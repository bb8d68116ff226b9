"""What is reused of a conversation after a restart, where that is not simply all of it.

With SmolLM2, a conversation of 6,000 tokens one block of which is damaged on disk. With tiny models of random weights,
over HTTP, the next turn of a conversation whose memory cannot be cut (recurrent layers, a sliding window).
"""

from __future__ import annotations

from pathlib import Path

from tests.engine.tiny_models import write_tiny_models

from benchmarks.inprocess import NO_FLOORS, Bench, say
from benchmarks.process import serving
from benchmarks.save import BLOCK_TOKENS
from benchmarks.stall import park
from benchmarks.text import prose
from strata.cache.cache import CacheLimits
from strata.rules import prefix
from strata.serve.wiring import find_model
from strata.store.names import segment_path
from strata.types import PAGE

LADDER_TOKENS = 6000
UNCUT = {"hybrid": "qwen35", "swa": "gemma3"}
"""Figure -> tiny model."""
PROMPT_SENTENCES = 90
REPLY_TOKENS = 8


async def ladder(folder: Path) -> dict[str, float]:
    """One bit of the middle block is flipped; a new process restores the conversation, and what it reuses is right."""
    limits = CacheLimits(floors=NO_FLOORS, park_target="disk", ladder=True)
    async with Bench(folder, flash_attention="on", limits=limits) as bench:
        tokens = await bench.fill(0, LADDER_TOKENS, await bench.tokens_of(prose(60, seed=21)))
        root = prefix.root_key(bench.engine.info.fingerprint, "ladder")
        await park(bench, tokens, root)
        assert await bench.cache.flush(60), "the park does not end"
        (stored,) = bench.cache.disks[0].index.conversations()
        segments = prefix.chain(root, tokens, prefix.cuts(len(tokens), None))
        damaged = segments[len(segments) // 2]
        right = await bench.state_bytes(damaged.start)
    assert damaged.key in stored.keys and damaged.n_tokens <= BLOCK_TOKENS, "a segment of one block"
    path = folder / segment_path(damaged.key, 0)
    data = bytearray(path.read_bytes())
    data[(PAGE + len(data)) // 2] ^= 1
    path.write_bytes(data)
    async with Bench(folder, flash_attention="on", limits=limits) as bench:
        found = bench.cache.lookup(root, tokens, beyond=1)
        assert found is not None, "it is stored"
        restored = await bench.cache.restore(0, found, 0)
        assert await bench.state_bytes(damaged.start) == right, "what is reused differs from what was parked"
    say(f"damaged at [{damaged.start}, {damaged.end}) of {len(tokens)}: {restored.held} reused; {restored.failed}")
    return {"ladder_reused": restored.held, "ladder_before_damage": damaged.start}


def uncut(folder: Path) -> dict[str, float]:
    """Fractions of the next turn's prompt that are not read again after a restart."""
    folder.mkdir()
    models = write_tiny_models(folder, vocabulary_of=find_model("demo"))
    return {f"{figure}_reused": _reused(folder / figure, models[name]) for figure, name in UNCUT.items()}


def _reused(kept: Path, model: Path) -> float:
    flags = ("--parallel=1", "--context=4096", "--threads=1", f"--conversation-cache-cold-dir={kept}")
    messages = [{"role": "user", "content": prose(PROMPT_SENTENCES, seed=31)}]
    with serving(*flags, model=str(model)) as server:
        first = server.chat(messages, max_tokens=REPLY_TOKENS)
        server.level()
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Which note comes last?"}]
    with serving(*flags, model=str(model)) as server:
        reply = server.chat(messages, max_tokens=REPLY_TOKENS)
    say(f"{model.stem}: {reply.cached_tokens} of {reply.prompt_tokens} tokens reused; {reply.cache_header}")
    return reply.cached_tokens / reply.prompt_tokens
