"""Where a system prompt ends, what names it, and which ones are too many."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.rules.prefix import chain, cuts, root_key
from strata.rules.system_prompts import beyond_count, variant_of, variant_root
from strata.types import Key, Tokens

ROOT = root_key(b"model", "alice")
OPENER = 7


def prompt(n_tokens: int, *openers_at: int) -> Tokens:
    tokens = np.full(n_tokens, 1, np.int32)
    tokens[list(openers_at)] = OPENER
    return tokens


@pytest.mark.parametrize(
    ("n_tokens", "openers_at", "least", "end"),
    [
        (3100, (0, 3000, 3050), 2048, 3000),
        (3100, (0, 20, 3000), 2048, 3000),  # a short system prompt, then a long first turn
        (3100, (0, 2047, 2048), 2048, 2048),
        (3100, (0, 2047), 2048, None),
        (3100, (0,), 0, None),  # the opener at position 0 opens the system prompt itself
        (3100, (0, 20, 3000), 0, 20),
        (3100, (), 2048, None),
        (3001, (0, 3000), 2048, 3000),  # nothing but the opener behind it
    ],
)
def test_it_ends_at_the_first_opener_that_is_deep_enough(
    n_tokens: int, openers_at: tuple[int, ...], least: int, end: int | None
) -> None:
    found = variant_of(ROOT, "", prompt(n_tokens, *openers_at), {OPENER}, least)
    assert (None if found is None else found.n_tokens) == end


def test_the_names_of_one_do_not_change_from_version_to_version() -> None:
    plain = variant_of(ROOT, "", prompt(600, 0, 520), {OPENER}, 500)
    declared = variant_of(ROOT, "tools-v2", prompt(600, 0, 520), {OPENER}, 500)
    assert plain is not None and declared is not None
    assert plain.name.hex()[:16] == "6fbd9cb6566c2b68"
    assert declared.name.hex()[:16] == "d967c8230c7117d9"


@given(
    st.lists(st.sampled_from([1, 2, OPENER]), min_size=1, max_size=700),
    st.integers(0, 600),
    st.lists(st.sampled_from([1, 2, OPENER]), max_size=50),
)
def test_it_depends_on_nothing_behind_the_opener(head: list[int], least: int, more: list[int]) -> None:
    tokens = np.array(head, np.int32)
    found = variant_of(ROOT, "", tokens, {OPENER}, least)
    longer = variant_of(ROOT, "", np.array(head + more, np.int32), {OPENER}, least)
    if found is None:
        assert not (tokens[max(1, least) :] == OPENER).any()
        return
    end = found.n_tokens
    assert longer is not None and longer.name == found.name
    assert max(1, least) <= end < len(tokens) and tokens[end] == OPENER
    assert not (tokens[max(1, least) : end] == OPENER).any()
    assert found.segments == chain(ROOT, tokens[:end], cuts(end)), "a conversation's segments, so levels can share"


@given(st.text(st.characters(codec="ascii"), max_size=20), st.text(st.characters(codec="ascii"), max_size=20))
def test_a_declared_key_is_part_of_the_name(one: str, other: str) -> None:
    assert (variant_root(ROOT, one) == variant_root(ROOT, other)) == (one == other)
    assert variant_root(ROOT, one) != variant_root(Key(bytes(32)), one)
    assert (variant_root(ROOT, one) == ROOT) == (one == "")


@pytest.mark.parametrize(
    ("stamps_s", "most", "gone"),
    [
        ([(3.0, 1), (1.0, 2), (2.0, 3)], 2, (2,)),
        ([(3.0, 1), (1.0, 2), (2.0, 3)], 1, (2, 3)),
        ([(3.0, 1), (1.0, 2), (2.0, 3)], 3, ()),
        ([(3.0, 1), (1.0, 2), (2.0, 3)], 0, ()),
        ([(1.0, 2), (1.0, 1)], 1, (1,)),
        ([], 2, ()),
    ],
)
def test_the_ones_unused_longest_go(stamps_s: list[tuple[float, int]], most: int, gone: tuple[int, ...]) -> None:
    assert beyond_count(stamps_s, most) == gone
