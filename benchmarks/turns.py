"""What a conversation writes to the disk while it grows turn by turn, against what it takes there in the end.

A real server with RAM and disk, every RAM park mirrored. Each turn is written before the next begins: the worst case,
for turns that come faster collapse into one write.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.inprocess import say
from benchmarks.process import serving
from benchmarks.text import prose
from strata.types import MIB

REPLY_TOKENS = 8
OVERHEAD_TOKENS = 17
"""Tokens of a turn beside its question: the template's, and the reply."""
SENTENCE_TOKENS = 14.4


def written_per_final(folder: Path, *, turns: int, tokens: int) -> float:
    """Bytes written over all turns / bytes the level takes at the end."""
    sentences = (tokens - OVERHEAD_TOKENS) / SENTENCE_TOKENS
    flags = (
        *("--parallel", "1", "--context", "8192", "--flash-attention", "on"),
        *("--conversation-cache-mib", "512", "--conversation-cache-min-free-mib", "0"),
        *("--conversation-cache-park-min-free-mib", "0", "--conversation-cache-cold-dir", str(folder)),
    )
    messages: list[dict[str, str]] = []
    with serving(*flags) as server:
        again = known = 0
        for turn in range(turns):
            n = round(sentences * (turn + 1)) - round(sentences * turn)
            messages.append({"role": "user", "content": prose(n, seed=turn)})
            reply = server.chat(messages, max_tokens=REPLY_TOKENS)
            messages.append({"role": "assistant", "content": reply.text})
            again += max(0, known - reply.cached_tokens)
            known = reply.prompt_tokens
            level = server.level()
        written, final = level["writer"]["bytes_written"], level["used_bytes"]
    say(
        f"{turns} turns, {reply.prompt_tokens / turns:.0f} tokens each: {written / MIB:.1f} MiB written, "
        f"{final / MIB:.1f} MiB in the end; {again} prompt tokens read again"
    )
    return float(written / final)
