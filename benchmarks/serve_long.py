"""The parts of `make bench-serve` with long conversations: behind 4,000 tokens, beside a long read, and coming back."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.clients import Answer, Messages, ask, question, rate
from benchmarks.inprocess import say
from benchmarks.pairs import both, in_turns, shape
from benchmarks.process import ServerProcess, serving
from benchmarks.stall import p99
from benchmarks.text import prose

LONG_SENTENCES, LONG_CONTEXT = 275, 5120
"""About 4,000 tokens."""
BESIDE_SENTENCES, BESIDE_CONTEXT = 415, 8192
"""About 6,000 tokens."""
RETURNING_SENTENCES, RETURNING_CONTEXT = 205, 4096
"""About 3,000 tokens."""
CONVERSATIONS, SLOTS = 6, 2
LARGE_MIB = 8192


class Talk:
    """One conversation as its client knows it."""

    def __init__(self, seed: int, sentences: int) -> None:
        self._seed = seed
        self._sentences = sentences
        self.messages: Messages = []

    async def turn(self, server: ServerProcess, max_tokens: int) -> Answer:
        """The next turn: the first one is long, the others say little."""
        text = "Go on." if self.messages else prose(self._sentences, seed=self._seed)
        self.messages += question(text)
        answer = await ask(server.url, self.messages, max_tokens=max_tokens)
        self.messages.append({"role": "assistant", "content": answer.text})
        return answer


# ----------------------------------------------------------------------------------------------------------------- long


async def long(_folder: Path, rounds: int) -> dict[str, float]:
    with both(4, LONG_CONTEXT, strata=("--pool", "auto")) as servers:
        engine = servers[0].status()["engine"]
        say(f"the pool is {engine['pool']}: {engine['pool_reason']}")
        talks = {server.url: [Talk(3000 + i, LONG_SENTENCES) for i in range(4)] for server in servers}

        async def write(server: ServerProcess, n: int) -> float:
            answers = await asyncio.gather(*(talk.turn(server, 48 if n else 4) for talk in talks[server.url]))
            return rate(list(answers))

        return {"decode_ratio_4_long": await in_turns("4 long, tokens/s", servers, write, rounds)}


# --------------------------------------------------------------------------------------------------------------- agenda


async def beside_a_read(server: ServerProcess) -> tuple[float, float]:
    """99th percentile of the gaps between the tokens of three who write while a prompt is read, and its time."""
    texts = [question(prose(2, seed=4000 + i)) for i in range(3)]
    begun: asyncio.Queue[Answer] = asyncio.Queue()

    def note(answer: Answer) -> None:
        if len(answer.at) == 20:
            begun.put_nowait(answer)

    most = BESIDE_CONTEXT - 200
    writers = [asyncio.create_task(ask(server.url, text, max_tokens=most, on_text=note)) for text in texts]
    writing = [await begun.get() for _ in writers]
    read = await ask(server.url, question(prose(BESIDE_SENTENCES, seed=4100)), max_tokens=1)
    assert not any(writer.done() for writer in writers), "the others ended before the prompt was read"
    for writer in writers:
        writer.cancel()
    await asyncio.gather(*writers, return_exceptions=True)
    return p99(gaps(writing, read.sent_s, read.at[0])), read.ttft_s


def gaps(answers: Sequence[Answer], begin: float, end: float) -> list[float]:
    """Seconds between neighbouring pieces, of every gap that overlaps [begin, end]."""
    return [
        b - a for answer in answers for a, b in zip(answer.at, answer.at[1:], strict=False) if b > begin and a < end
    ]


async def agenda(_folder: Path, _rounds: int) -> dict[str, float]:
    found = {}
    for state in ("off", "on"):
        with serving(*shape(4, BESIDE_CONTEXT), "--flash-attention", "on", "--batch-agenda", state) as server:
            found[state] = await beside_a_read(server)
        say(f"agenda {state}: gaps of {found[state][0]:.3f} s (p99) beside a read of {found[state][1]:.1f} s")
    return {
        "gap_ratio": found["on"][0] / found["off"][0],
        "agenda_read_ratio": found["on"][1] / found["off"][1],
    }


# ------------------------------------------------------------------------------------------------------------ returning


async def come_back(server: ServerProcess, talks: Sequence[Talk]) -> float:
    """One round: every conversation's next turn, one after the other. The median of the times to the first token."""
    return statistics.median([(await talk.turn(server, 8)).ttft_s for talk in talks])


async def returning(folder: Path, rounds: int, cache_ram: int) -> float:
    """Six conversations take turns on two slots, so each has left its slot when it comes back."""
    keeps = (
        *("--conversation-cache-mib", "2048", "--conversation-cache-slots", "16"),
        *("--conversation-cache-cold-dir", str(folder)),
    )
    with both(SLOTS, RETURNING_CONTEXT, strata=keeps, cache_ram=cache_ram) as servers:
        talks = {server.url: [Talk(5000 + i, RETURNING_SENTENCES) for i in range(CONVERSATIONS)] for server in servers}

        async def measure(server: ServerProcess, _: int) -> float:
            return await come_back(server, talks[server.url])

        return await in_turns("seconds until a conversation goes on", servers, measure, rounds)


async def against_ram(folder: Path, rounds: int) -> dict[str, float]:
    return {"returning_ttft_vs_ram": await returning(folder, rounds, LARGE_MIB)}


async def against_none(folder: Path, _rounds: int) -> dict[str, float]:
    return {"returning_ttft_vs_none": await returning(folder, 2, 0)}
