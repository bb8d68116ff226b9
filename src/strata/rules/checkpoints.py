"""Where memory that cannot be cut gets checkpoints, and which of them a conversation keeps: pure.

The root (where the system prompt ends), the prompt's frontier, every so many tokens, and the end of the turn. The
newest are kept, which are the deepest; the root and the deepest are the last to go.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLimits:
    """`keep`: most of one conversation. `every`: one at each multiple, 0 = none. `root`: where it lies at the least."""

    keep: int = 6
    every: int = 16384
    root: int = 2048


def root_position(openers_at: Sequence[int], least: int) -> int | None:
    """The first turn opener at or behind `least`, of those behind position 0."""
    return next((int(at) for at in openers_at if at >= max(1, least)), None)


def kept(positions: Collection[int], *, root: int | None, keep: int) -> tuple[int, ...]:
    """Of these positions the ones that stay, ascending: the root, unless only one may, and the deepest."""
    ordered = sorted(set(positions))
    deepest = ordered[-keep:]
    if root is None or root not in ordered or root in deepest or keep == 1:
        return tuple(deepest)
    return (root, *deepest[1:])


def outlive(old: Collection[int], newer: Collection[int], *, shared: int, root: int | None, keep: int) -> bool:
    """Whether a state must stay for its checkpoints' sake, although a newer one goes on from its first `shared` tokens.

    `old`, `newer`: the positions of both; `root`: of the newer one. It must when the newer one lacks one that it would
    keep if it had it.
    """
    lacking = {at for at in old if at <= shared} - set(newer)
    stay = kept({*lacking, *newer}, root=root, keep=keep)
    return not lacking.isdisjoint(stay)


def to_take(
    n_tokens: int, openers_at: Sequence[int], limits: CheckpointLimits, *, held: int, stored: Collection[int]
) -> tuple[int, ...]:
    """Where to stop while a prompt of `n_tokens` is read into a slot that holds [0, held), ascending.

    Not where one is `stored` already, and only those that will still be kept when the turn has ended.
    """
    root = root_position(openers_at, limits.root)
    wanted = set(range(limits.every, n_tokens, limits.every)) if limits.every else set()
    wanted |= {int(openers_at[-1])} if len(openers_at) else set()
    wanted |= {root} if root is not None else set()
    stay = kept({*wanted, *stored, n_tokens + 1}, root=root, keep=limits.keep)
    return tuple(at for at in stay if at in wanted and held < at < n_tokens and at not in stored)
