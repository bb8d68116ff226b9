"""The batch agenda: what one step of the engine does, and which prompt is read next (SPEC §9). Pure.

Tokens and seconds in, a plan out; the engine loop carries it out. With the agenda on, a step has a token budget: a row
for every slot that writes comes first, prompts are read with what is left, and a read that gets nothing ages until it
gets a whole chunk. With it off, prompts are read in full batches, and writing gets a share of the time in between.
Which request gets a slot is not decided here (`slots.py`), nor how long a chunk may take (the loop measures that).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_ROWS = 8
"""Rows that the token budget counts; a step has one for every slot that writes all the same."""
DEFAULT_DECODE_SHARE = 0.5
_YIELDS_ON, _YIELDS_OFF = 32, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """The settings. `decode_share` None: not set explicitly; when it is, it wins over the token budget."""

    enabled: bool = False
    chunk: int = 512
    budget: int = 520
    age: int = 4
    decode_share: float | None = None

    @property
    def by_time(self) -> bool:
        """Whether writing gets a share of the time, not of the tokens."""
        return not self.enabled or self.decode_share is not None

    @property
    def most_yields(self) -> int:
        """How many prompts may overtake one long read."""
        return _YIELDS_ON if self.enabled else _YIELDS_OFF


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One step: a row for every slot that writes or none, and at most `read` prompt tokens. `starved`: for the next."""

    decode: bool
    read: int
    starved: int


def chunk_tokens(full: int, chunk: int) -> int:
    """The most tokens read in one step: a full batch, or what the knob says (<= 0: a full batch)."""
    return full if chunk <= 0 else max(1, min(full, chunk))


def read_tokens(*, active: int, chunk: int, budget: int) -> int:
    """Prompt tokens that the budget leaves to a step in which `active` slots write."""
    if not active:
        return chunk
    return max(0, min(chunk, budget - min(MOST_ROWS, active)))


def plan_turn(*, active: int, full: int, knobs: Knobs, starved: int) -> Turn:
    """The next step while a prompt waits to be read, by tokens. `full`: tokens of a full batch."""
    chunk = chunk_tokens(full, knobs.chunk)
    read = read_tokens(active=active, chunk=chunk, budget=knobs.budget)
    if read > 0:
        return Turn(decode=active > 0, read=read, starved=0)
    if starved >= knobs.age > 0:
        return Turn(decode=False, read=chunk, starved=0)
    return Turn(decode=True, read=1, starved=starved + 1)


def plan_timed_turn(*, active: int, full: int, knobs: Knobs, owed_s: float) -> Turn:
    """The next step while a prompt waits to be read, by time. `owed_s`: what writing is still owed (`owed_after`)."""
    if active and owed_s > 0:
        return Turn(decode=True, read=0, starved=0)
    # the knob belongs to the agenda: without it a batch is full
    return Turn(decode=False, read=chunk_tokens(full, knobs.chunk if knobs.enabled else 0), starved=0)


def owed_after(turn: Turn, *, seconds: float, active: int, knobs: Knobs, owed_s: float) -> float:
    """What writing is owed once `turn` took `seconds`: its share of the time that a read took."""
    if not active:
        return 0.0
    if turn.decode:
        return owed_s - seconds
    share = DEFAULT_DECODE_SHARE if knobs.decode_share is None else knobs.decode_share
    return max(0.0, owed_s) + seconds * share / (1 - share)


# ------------------------------------------------------------------------------------------------------- order of reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A prompt that is being read: `left` tokens are missing. `gave_way_to`: the requests that overtook it so far."""

    request: int
    left: int
    gave_way_to: frozenset[int] = frozenset()


def choose_read(reads: Sequence[Reading], most_yields: int) -> tuple[int, dict[int, int]]:
    """Which of `reads` (in order of arrival) comes next: the first, unless it gives way.

    It gives way to a later prompt of which at most half as much is left, to at most `most_yields` of them in all.
    Returns the index, and who gave way to whom (request numbers), which the caller remembers.
    """
    best, gave_way = 0, {}
    for i, read in enumerate(reads):
        first = reads[best]
        may = read.request in first.gave_way_to or len(first.gave_way_to) < most_yields
        if i and may and 2 * read.left <= first.left:
            gave_way[first.request] = read.request
            best = i
    return best, gave_way


def share_out(read: int, lefts: Sequence[int]) -> list[int]:
    """Tokens for each prompt, in order: the first takes what it can use, the next ones share the rest of the batch."""
    shares = []
    for left in lefts:
        shares.append(min(read, left))
        read -= shares[-1]
    return shares
