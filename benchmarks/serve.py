"""make bench-serve: Strata against llama-server, same model, threads, K/V and client. The last line is one JSON object.

Both servers run in processes of their own; one at a time has work, both orders, every figure a median of ratios. Rates
of writing and reading, time to the first token and what the loop adds to a step are here; conversations that are long
or come back in serve_long.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from pathlib import Path

from benchmarks import serve_long
from benchmarks.clients import ask, question, rate
from benchmarks.inprocess import say
from benchmarks.llama_server import check_installed
from benchmarks.pairs import both, in_turns
from benchmarks.prepare import measure as measure_prepare
from benchmarks.process import ServerProcess
from benchmarks.text import prose

SLOTS, CONTEXT = 4, 2048
WRITTEN = 128
READ_SENTENCES = 100
"""About 1,450 tokens."""
SHORT_SENTENCES = 5
"""With what the template adds, about 100 tokens."""
DESCRIPTION = (__doc__ or "").partition("\n")[0]


async def write(server: ServerProcess, n: int, clients: int) -> float:
    """Tokens per second of `clients` that write at once."""
    asked = [ask(server.url, question(prose(2, seed=10 * n + i)), max_tokens=WRITTEN) for i in range(clients)]
    return rate(await asyncio.gather(*asked))


async def read(server: ServerProcess, n: int) -> float:
    """Prompt tokens per second, of a prompt that is new but for the template's first words."""
    answer = await ask(server.url, question(prose(READ_SENTENCES, seed=1000 + n)), max_tokens=1)
    return answer.read_tokens / answer.ttft_s


async def first_token(server: ServerProcess, n: int) -> float:
    """Seconds from the request to the first piece of text."""
    return (await ask(server.url, question(prose(SHORT_SENTENCES, seed=2000 + n)), max_tokens=2)).ttft_s


async def decode(_folder: Path, rounds: int) -> dict[str, float]:
    with both(SLOTS, CONTEXT) as servers:
        one = await in_turns("1 client, tokens/s", servers, lambda s, n: write(s, n, 1), rounds)
        before = servers[0].status()["engine"]["steps"]
        four = await in_turns("4 clients, tokens/s", servers, lambda s, n: write(s, n, 4), rounds)
        after = servers[0].status()["engine"]["steps"]
    steps = {name: after[name] - before[name] for name in after}
    say(f"of {steps['count']} steps: {steps}")
    return {
        "decode_ratio_1": one,
        "decode_ratio_4": four,
        "loop_overhead_us": 1e6 * steps["outside_s"] / steps["count"],
    }


async def prefill(_folder: Path, rounds: int) -> dict[str, float]:
    """In the default pool, where a row looks at idle conversations too, and in a split one, which theirs is."""
    with both(SLOTS, CONTEXT) as servers:
        unified = await in_turns("prompt tokens/s", servers, read, rounds)
    with both(SLOTS, CONTEXT, strata=("--pool", "split")) as servers:
        split = await in_turns("prompt tokens/s, split pool", servers, read, rounds)
    return {"prefill_ratio": unified, "prefill_ratio_split": split}


async def ttft(_folder: Path, rounds: int) -> dict[str, float]:
    with both(SLOTS, CONTEXT) as servers:
        return {"ttft_ratio": await in_turns("seconds to the first token", servers, first_token, 2 * rounds)}


async def prepare(_folder: Path, _rounds: int) -> dict[str, float]:
    return await measure_prepare()


Part = Callable[[Path, int], Awaitable[dict[str, float]]]
PARTS: dict[str, Part] = {
    "decode": decode,
    "prefill": prefill,
    "ttft": ttft,
    "long": serve_long.long,
    "agenda": serve_long.agenda,
    "returning-ram": serve_long.against_ram,
    "returning-none": serve_long.against_none,
    "prepare": prepare,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=DESCRIPTION)
    parser.add_argument("parts", nargs="*", default=PARTS, metavar="part", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of measurements of each figure")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="a directory on the disk to use")
    given = parser.parse_args()
    if unknown := [part for part in given.parts if part not in PARTS]:
        parser.error(f"{unknown[0]} is none of {', '.join(PARTS)}")
    check_installed()
    say(f"llama-cpp-python {version('llama-cpp-python')} against xllamacpp {version('xllamacpp')}")
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="strata-bench-", dir=given.dir) as folder:
        for part in given.parts:
            figures |= asyncio.run(PARTS[part](Path(folder) / part, given.rounds))
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
