"""Restoring: which rung comes after one that failed, and whether restoring is cheaper than reading again.

Covers the ladder of SPEC §7 as a choice between offers, and the two costs with how measurements move them. Pure: what
the levels can offer, what was measured and who carries it out come from cache/ladder.py and cache/costs.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from strata.types import MIB


class Rung(IntEnum):
    """The rungs of the ladder, from the whole entry down to reading everything."""

    WHOLE = 0
    OTHER_LEVEL = 1
    GOOD_PART = 2
    OTHER_CONVERSATION = 3
    SYSTEM_PROMPT = 4
    READ = 5

    @property
    def label(self) -> str:
        """Its name in counters and in texts for people."""
        return self.name.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a rung can bring the slot to: positions [0, upto). `pays`: that costs less than reading them."""

    rung: Rung
    upto: int
    pays: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What happens next. `offer` is the index of the offer to climb to; None: the slot ends with [0, upto)."""

    rung: Rung
    upto: int
    offer: int | None = None


def next_rung(*, before: int, held: int, offers: Sequence[Offer], climbs: bool) -> Step:
    """The rung after a failed one, in a slot that held [0, before) and now holds [0, held), all of it verified.

    Without the ladder (`climbs`) there is one: what was there before. With it the longest offer that reaches beyond
    `held` wins, and of equal ones the lower rung; when there is none, what is verified stays.
    """
    if not climbs:
        return Step(rung=Rung.READ, upto=min(before, held))
    better = [(i, offer) for i, offer in enumerate(offers) if offer.pays and offer.upto > held]
    if better:
        i, best = min(better, key=lambda pair: (-pair[1].upto, pair[1].rung))
        return Step(rung=best.rung, upto=best.upto, offer=i)
    return Step(rung=Rung.GOOD_PART if held > before else Rung.READ, upto=held)


# ------------------------------------------------------------------------------------------------------- does it pay?

LEAST_RESTORE_TOKENS = 16
"""While costs are not known, fewer tokens than this are read again, and more are restored."""
TRUSTED_SAMPLES = 3
"""Measurements after which a cost is known."""
_KEPT_SAMPLES = 5
_REFUSALS_TO_FORGET = 4
_READ_AT_LEAST = 32
"""Reads of fewer tokens measure what a step costs, not what a token does."""
_LARGE_BYTES = 8 * MIB
"""A restore of fewer bytes measures what every restore costs, one of more what a byte does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Seconds for one unit of something: the median of the last few measurements, `start` before there are any.

    A median, so that one that is off (a disk that had to spin up, a machine that slept) changes nothing, by however
    much it is off; three in a row are believed.
    """

    start: float
    recent: tuple[float, ...] = ()

    @property
    def value(self) -> float:
        return sorted(self.recent)[(len(self.recent) - 1) // 2] if self.recent else self.start

    @property
    def known(self) -> bool:
        return len(self.recent) >= TRUSTED_SAMPLES

    def measured(self, sample: float) -> Estimate:
        return replace(self, recent=(*self.recent, max(0.0, sample))[-_KEPT_SAMPLES:])

    def forgetting(self) -> Estimate:
        """Without its oldest measurement."""
        return replace(self, recent=self.recent[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreCost:
    """What restoring from one level costs: seconds for every restore, and seconds for a byte.

    `refusals`: restores that were not worth it since one was measured.
    """

    fixed: Estimate
    byte: Estimate
    refusals: int = 0

    def seconds(self, n_bytes: int) -> float:
        return self.fixed.value + n_bytes * self.byte.value

    def known(self, n_bytes: int) -> bool:
        """Whether restores of about so many bytes were measured."""
        return (self.byte if n_bytes >= _LARGE_BYTES else self.fixed).known

    def measured(self, n_bytes: int, seconds: float) -> RestoreCost:
        """After a restore of `n_bytes`, all of this level."""
        if n_bytes >= _LARGE_BYTES:
            byte = self.byte.measured((seconds - self.fixed.value) / n_bytes)
            return replace(self, byte=byte, refusals=0)
        return replace(self, fixed=self.fixed.measured(seconds - n_bytes * self.byte.value), refusals=0)

    def refused(self) -> RestoreCost:
        """After one that was not worth it. What is refused is not measured, so a cost that was true once would stay.

        Every few refusals a measurement is forgotten, until the cost is not known any more and is measured again.
        """
        refusals = self.refusals + 1
        if refusals % _REFUSALS_TO_FORGET:
            return replace(self, refusals=refusals)
        return replace(self, fixed=self.fixed.forgetting(), byte=self.byte.forgetting(), refusals=refusals)


RAM_COST = RestoreCost(fixed=Estimate(start=5e-3), byte=Estimate(start=1 / 1e9))
"""Of RAM until it is measured: 5 ms and 1 GB/s."""
DISK_COST = RestoreCost(fixed=Estimate(start=1e-2), byte=Estimate(start=1 / 200e6))
"""Of a disk until it is measured: 10 ms and 200 MB/s, which a hard disk does."""
READ_COST = Estimate(start=0.0)
"""Of reading: there is no model for which a number would be right, so it is not used until it is known."""


def read_cost(before: Estimate, n_tokens: int, seconds: float) -> Estimate:
    """Seconds to read a token, after a read of `n_tokens`."""
    if n_tokens < _READ_AT_LEAST or seconds <= 0:
        return before
    return before.measured(seconds / n_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether to restore `tokens`, and the two costs in seconds. `read_s` None: not known yet."""

    pays: bool
    tokens: int
    restore_s: float
    read_s: float | None

    def text(self) -> str:
        """Both numbers, for people."""
        read = "not measured yet" if self.read_s is None else f"{self.read_s * 1000:.1f} ms"
        return f"restoring {self.tokens} tokens costs about {self.restore_s * 1000:.1f} ms, reading them {read}"


def verdict(*, tokens: int, read: Estimate, parts: Iterable[tuple[RestoreCost, int]]) -> Verdict:
    """Whether restoring beats reading `tokens` again. `parts`: cost and bytes of each level that has some of them.

    As long as one of the costs is not known, their number decides: a restore in vain costs milliseconds, a read in vain
    minutes.
    """
    parts = tuple(parts)
    restore_s = sum(cost.seconds(n_bytes) for cost, n_bytes in parts)
    read_s = tokens * read.value if read.known else None
    if read_s is None or not all(cost.known(n_bytes) for cost, n_bytes in parts):
        return Verdict(pays=tokens >= LEAST_RESTORE_TOKENS, tokens=tokens, restore_s=restore_s, read_s=read_s)
    return Verdict(pays=tokens > 0 and restore_s <= read_s, tokens=tokens, restore_s=restore_s, read_s=read_s)
