"""The next rung, and whether restoring pays: tables and properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.rules.restore import (
    DISK_COST,
    LEAST_RESTORE_TOKENS,
    RAM_COST,
    READ_COST,
    TRUSTED_SAMPLES,
    Estimate,
    Offer,
    RestoreCost,
    Rung,
    Step,
    next_rung,
    read_cost,
    verdict,
)
from strata.types import MIB


def offer(rung: Rung, upto: int, *, pays: bool = True) -> Offer:
    return Offer(rung=rung, upto=upto, pays=pays)


@pytest.mark.parametrize(
    ("before", "held", "offers", "expected"),
    [
        (0, 0, [], Step(rung=Rung.READ, upto=0)),
        (40, 40, [], Step(rung=Rung.READ, upto=40)),
        (0, 256, [], Step(rung=Rung.GOOD_PART, upto=256)),
        (0, 256, [offer(Rung.OTHER_LEVEL, 700)], Step(rung=Rung.OTHER_LEVEL, upto=700, offer=0)),
        (0, 256, [offer(Rung.OTHER_LEVEL, 256)], Step(rung=Rung.GOOD_PART, upto=256)),
        (0, 256, [offer(Rung.OTHER_LEVEL, 700, pays=False)], Step(rung=Rung.GOOD_PART, upto=256)),
        (
            0,
            256,
            [offer(Rung.SYSTEM_PROMPT, 400), offer(Rung.OTHER_CONVERSATION, 500), offer(Rung.OTHER_LEVEL, 300)],
            Step(rung=Rung.OTHER_CONVERSATION, upto=500, offer=1),
        ),
        (
            0,
            0,
            [offer(Rung.SYSTEM_PROMPT, 400), offer(Rung.OTHER_CONVERSATION, 400), offer(Rung.OTHER_LEVEL, 400)],
            Step(rung=Rung.OTHER_LEVEL, upto=400, offer=2),
        ),
        (0, 0, [offer(Rung.SYSTEM_PROMPT, 400)], Step(rung=Rung.SYSTEM_PROMPT, upto=400, offer=0)),
    ],
)
def test_the_next_rung(before: int, held: int, offers: list[Offer], expected: Step) -> None:
    assert next_rung(before=before, held=held, offers=offers, climbs=True) == expected


def test_without_the_ladder_there_is_what_was_there_before() -> None:
    assert next_rung(before=40, held=256, offers=[offer(Rung.OTHER_LEVEL, 700)], climbs=False) == Step(
        rung=Rung.READ, upto=40
    )
    assert next_rung(before=40, held=0, offers=[], climbs=False).upto == 0, "the engine lost even that"


OFFERS = st.lists(
    st.builds(
        Offer,
        rung=st.sampled_from([Rung.OTHER_LEVEL, Rung.OTHER_CONVERSATION, Rung.SYSTEM_PROMPT]),
        upto=st.integers(0, 5000),
        pays=st.booleans(),
    )
)


@given(held=st.integers(0, 5000), offers=OFFERS, climbs=st.booleans())
def test_a_rung_is_climbed_only_for_more_tokens_and_never_past_a_better_one(
    held: int, offers: list[Offer], climbs: bool
) -> None:
    step = next_rung(before=0, held=held, offers=offers, climbs=climbs)
    if step.offer is None:
        assert step.upto == (held if climbs else 0)
        assert not climbs or all(o.upto <= held for o in offers if o.pays)
    else:
        assert climbs and offers[step.offer].pays
        assert step.upto == offers[step.offer].upto > held
        assert all(o.upto <= step.upto for o in offers if o.pays)


# ----------------------------------------------------------------------------------------------------------------- cost


def known(value: float) -> Estimate:
    return Estimate(start=value, recent=(value,) * TRUSTED_SAMPLES)


SMALL_CPU = known(0.004)  # SmolLM2-135M: 4 ms to read a token,
TOKEN_BYTES = 23040
FAST_DISK = RestoreCost(fixed=known(0.005), byte=known(0.00002 / TOKEN_BYTES))  # 5 ms + 0.02 ms a token to restore it


@pytest.mark.parametrize(("tokens", "pays"), [(1, False), (2, True), (15, True), (6000, True)])
def test_break_even_of_a_small_model_on_a_cpu(tokens: int, pays: bool) -> None:
    found = verdict(tokens=tokens, read=SMALL_CPU, parts=[(FAST_DISK, tokens * TOKEN_BYTES)])
    assert found.pays is pays
    assert f"{tokens} tokens" in found.text() and "ms" in found.text()


def test_a_slow_disk_under_a_fast_reader_does_not_pay() -> None:
    disk = RestoreCost(fixed=known(0.02), byte=known(1 / 100e6))
    found = verdict(tokens=6000, read=known(0.0002), parts=[(disk, 6000 * 100_000)])
    assert not found.pays
    assert found.text() == "restoring 6000 tokens costs about 6020.0 ms, reading them 1200.0 ms"


def test_while_costs_are_not_known_a_number_of_tokens_decides() -> None:
    dear = RestoreCost(fixed=known(100.0), byte=known(1.0))
    half = Estimate(start=0.0, recent=(0.004,) * (TRUSTED_SAMPLES - 1))
    large = RestoreCost(fixed=known(0.005), byte=Estimate(start=1.0))  # nothing large was measured
    for tokens in (LEAST_RESTORE_TOKENS - 1, LEAST_RESTORE_TOKENS):
        pays = tokens >= LEAST_RESTORE_TOKENS
        for read in (READ_COST, half):
            found = verdict(tokens=tokens, read=read, parts=[(dear, tokens * 1000)])
            assert found.pays is pays
            assert "not measured yet" in found.text()
        assert verdict(tokens=tokens, read=SMALL_CPU, parts=[(large, 8 * MIB)]).pays is pays
        assert verdict(tokens=tokens, read=SMALL_CPU, parts=[(FAST_DISK, 100), (DISK_COST, 100)]).pays is pays


def test_nothing_is_never_worth_restoring() -> None:
    assert not verdict(tokens=0, read=SMALL_CPU, parts=[]).pays
    assert not verdict(tokens=0, read=READ_COST, parts=[]).pays


OFF = st.floats(min_value=0, max_value=1e9, allow_nan=False)


@given(off=OFF, n_bytes=st.integers(1, 1 << 34), at=st.integers(0, 9), read_off=OFF, read_at=st.integers(0, 9))
def test_one_measurement_that_is_off_keeps_no_long_restore_from_happening(
    off: float, n_bytes: int, at: int, read_off: float, read_at: int
) -> None:
    """SmolLM2 on this CPU, with one restore and one read measured wrong by anything, at any time."""
    disk, read = DISK_COST, READ_COST
    for i in range(10):
        read = read_cost(read, 500, read_off if i == read_at else 500 * 0.004)
        disk = disk.measured(n_bytes, off) if i == at else disk.measured(MIB, 0.006).measured(100 * MIB, 0.1)
        assert verdict(tokens=6000, read=read, parts=[(disk, 6000 * TOKEN_BYTES)]).pays


def test_a_cost_that_was_true_once_is_measured_again() -> None:
    disk = DISK_COST
    for _ in range(20):
        disk = disk.measured(100 * MIB, 3600.0)  # for an hour or so, the disk was not itself
    refusals = 0
    while not verdict(tokens=6000, read=SMALL_CPU, parts=[(disk, 6000 * TOKEN_BYTES)]).pays:
        refusals += 1
        disk = disk.refused()
        assert refusals <= 12
    assert refusals > 3, "it is not tried again at once either"
    for _ in range(3):
        disk = disk.measured(100 * MIB, 0.1)
    assert verdict(tokens=6000, read=SMALL_CPU, parts=[(disk, 6000 * TOKEN_BYTES)]).pays


def test_an_estimate_finds_what_is_true() -> None:
    cost = RAM_COST
    for _ in range(20):
        cost = cost.measured(100 * MIB, 0.003 + 100 * MIB / 5e9).measured(MIB, 0.003 + MIB / 5e9)
    assert cost.seconds(50 * MIB) == pytest.approx(0.003 + 50 * MIB / 5e9, rel=0.05)


@pytest.mark.parametrize(("tokens", "seconds"), [(1, 1.0), (31, 1.0), (500, 0.0)])
def test_what_says_nothing_about_a_token_is_not_measured(tokens: int, seconds: float) -> None:
    assert read_cost(READ_COST, tokens, seconds) == READ_COST
