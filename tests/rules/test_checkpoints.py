"""Where checkpoints are taken, and which of them stay."""

from __future__ import annotations

import pytest

from strata.rules.checkpoints import CheckpointLimits, kept, outlive, root_position, to_take

LIMITS = CheckpointLimits(keep=6, every=1000, root=100)


@pytest.mark.parametrize(
    ("openers", "least", "root"),
    [([], 10, None), ([5, 30, 90], 10, 30), ([5, 30], 31, None), ([5, 30], 0, 5), ([30], 30, 30)],
)
def test_the_root_is_the_first_opener_that_is_deep_enough(openers: list[int], least: int, root: int | None) -> None:
    assert root_position(openers, least) == root


@pytest.mark.parametrize(
    ("positions", "root", "keep", "stay"),
    [
        ([], None, 6, ()),
        ([3, 1, 2], None, 6, (1, 2, 3)),
        ([1, 2, 3, 4], None, 2, (3, 4)),
        ([1, 2, 3, 4], 1, 2, (1, 4)),
        ([1, 2, 3, 4], 2, 3, (2, 3, 4)),
        ([1, 2, 3, 4], 1, 1, (4,)),
        ([1, 2, 3, 4], 9, 2, (3, 4)),
    ],
)
def test_the_deepest_stay_and_the_root(
    positions: list[int], root: int | None, keep: int, stay: tuple[int, ...]
) -> None:
    assert kept(positions, root=root, keep=keep) == stay


@pytest.mark.parametrize(
    ("old", "newer", "shared", "keep", "stays"),
    [
        ([], [90], 80, 6, False),
        ([40, 80], [40, 80, 90], 85, 6, False),
        ([40, 60, 80], [40, 90], 85, 6, True),  # it would have kept those at 60 and 80
        ([40, 60, 80], [40, 90], 85, 2, False),  # two: the root and the deepest, which it has
        ([30, 60], [40, 70, 80, 90], 85, 4, False),  # one before the root is no root
        ([40, 60], [70, 80, 90], 85, 3, True),  # it lacks the root
        ([40, 60], [70, 80, 90], 35, 3, False),  # the root of another prompt
        ([40, 80], [40, 90], 70, 6, False),  # the one at 80 is of a reply that was rewritten
        ([40, 60], [40, 70, 80, 90], 85, 4, False),  # dropped as one too many
        ([40, 60], [40, 70, 80, 90], 85, 5, True),
    ],
)
def test_a_state_stays_for_checkpoints_that_a_newer_one_lacks(
    old: list[int], newer: list[int], shared: int, keep: int, stays: bool
) -> None:
    assert outlive(old, newer, shared=shared, root=40, keep=keep) == stays


def test_a_prompt_is_read_up_to_its_root_its_frontier_and_the_multiples() -> None:
    assert to_take(2500, [50, 150, 2400], LIMITS, held=0, stored=()) == (150, 1000, 2000, 2400)


def test_what_the_slot_holds_and_what_is_stored_is_not_taken_again() -> None:
    assert to_take(2500, [50, 150, 2400], LIMITS, held=1000, stored={2000}) == (2400,)


def test_what_would_not_stay_is_not_taken() -> None:
    few = CheckpointLimits(keep=3, every=1000, root=100)
    # The end of the turn takes the third place.
    assert to_take(9500, [150, 9400], few, held=0, stored=()) == (150, 9400)
    assert to_take(9500, [150, 9400], CheckpointLimits(keep=1), held=0, stored=()) == ()


def test_a_prompt_without_turns_is_read_in_one_go() -> None:
    assert to_take(900, [], LIMITS, held=0, stored=()) == ()
    assert to_take(900, [], CheckpointLimits(every=0), held=0, stored=()) == ()
