"""A K/V pool that is smaller than what all slots may hold: who may start, and what idle slots give up.

Why nobody waits for ever. Cells are held by requests that run and by idle slots; who waits for room holds none. Who
waits is served by age, and the oldest of them starts as soon as nothing runs: alone it fits, because no request is
longer than the pool. Of those that run the engine pauses the youngest, so the oldest goes on to its end. Idle slots
give up their cells whenever somebody needs them. Pure; carried out by serve/pool.py, and in the engine by pausing.py.

Prefixes that slots share (forks) are counted for each of them: what is held is at most what is counted here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_MOST_RESERVED = 256
_RESERVED_SHARE = 8
"""A request that starts leaves so many tokens free for each that runs, an eighth of a small pool: who has paused and
was brought back shall get somewhere before the pool is full again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """`cells`: what all sequences together may hold. `limit`: the most that one of them may."""

    cells: int
    limit: int

    @property
    def reserve(self) -> int:
        """Tokens of growth that are counted for each request."""
        return min(_MOST_RESERVED, self.cells // _RESERVED_SHARE)

    def claim(self, tokens: int) -> int:
        """Cells that a request of so many tokens (prompt and reply so far) needs for now."""
        return min(tokens + self.reserve, self.limit)

    def may_start(self, tokens: int, running: Iterable[int]) -> bool:
        """Whether a request of `tokens` may run beside others of so many; always when there are none."""
        others = [self.claim(n) for n in running]
        return not others or self.claim(tokens) + sum(others) <= self.cells

    def excess(self, running: Iterable[int], others: int) -> int:
        """Cells that idle slots must give up so that all who run have their room; `others`: held by everybody else."""
        return max(0, sum(map(self.claim, running)) + others - self.cells)


def leaves_pool(*, held: int, cell_s: float, rows: int, restore_s: float) -> bool:
    """Whether an idle conversation has cost others, in `rows` of theirs, more than bringing it back will.

    `held`: its cells; `cell_s`: seconds that an idle cell costs a row. Nobody knows when it will go on; waiting until
    both costs are equal is never more than twice as dear as having known.
    """
    return rows * held * cell_s > restore_s


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleSlot:
    """What an idle slot holds. `kept`: it is kept outside the engine, or owed to nobody."""

    index: int
    held: int
    kept: bool
    last_used_s: float


def gives_up(idle: Sequence[IdleSlot], excess: int) -> tuple[int, ...]:
    """The idle slots that are emptied for `excess` cells: those first that lose nothing, the longest unused first."""
    chosen: list[int] = []
    for slot in sorted(idle, key=lambda slot: (not slot.kept, slot.last_used_s, slot.index)):
        if excess <= 0:
            break
        if slot.held:
            chosen.append(slot.index)
            excess -= slot.held
    return tuple(chosen)
