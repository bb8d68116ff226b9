"""Split characters and stop strings: pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.engine.text import StopScanner, TextStream

TEXT = "Grüße, 👨‍👩‍👧‍👦 und 漢字 sagt 🦊"


def stream(data: bytes, sizes: list[int], stops: list[str]) -> tuple[str, str | None]:
    text, out, at = TextStream(stops), "", 0
    for size in [*sizes, len(data)]:
        out += text.feed(data[at : at + size])
        at += size
    return out + text.finish(), text.stop_string


def cut_at_first_stop(text: str, stops: list[str]) -> str:
    """The oracle: read letter by letter, cut where a stop string is complete for the first time."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@given(st.text(), st.lists(st.integers(0, 5)), st.lists(st.text(max_size=4), max_size=4))
def test_any_cutting_of_the_bytes_gives_the_text_up_to_the_first_stop(
    text: str, sizes: list[int], stops: list[str]
) -> None:
    assert stream(text.encode(), sizes, stops)[0] == cut_at_first_stop(text, stops)


@given(st.text("ab", max_size=40), st.lists(st.integers(0, 3)), st.lists(st.text("ab", max_size=4), max_size=3))
def test_overlapping_stops(text: str, sizes: list[int], stops: list[str]) -> None:
    assert stream(text.encode(), sizes, stops)[0] == cut_at_first_stop(text, stops)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_no_replacement_character_for_split_characters(size: int) -> None:
    assert stream(TEXT.encode(), [size] * len(TEXT.encode()), [])[0] == TEXT


def test_an_unfinished_character_at_the_end_is_dropped() -> None:
    assert stream("ab🦊".encode()[:-1], [], [])[0] == "ab"


def test_invalid_bytes_become_replacement_characters() -> None:
    assert stream(b"a\xffb", [1, 1], [])[0] == "a�b"


def test_holds_back_only_what_may_become_a_stop() -> None:
    scanner = StopScanner(["<end>"])
    assert scanner.feed("one <e") == "one "
    assert scanner.feed("x") == "<ex"
    assert scanner.feed(" <end") == " "
    assert scanner.finish() == "<end"
    assert scanner.found is None


def test_says_which_stop_it_was_and_gives_nothing_behind_it() -> None:
    scanner = StopScanner(["\n\n", "漢字"])
    assert scanner.feed("text 漢") == "text "
    assert scanner.feed("字 more\n\n") == ""
    assert scanner.found == "漢字"
    assert scanner.feed("more") == "" and scanner.finish() == ""


def test_empty_stop_strings_mean_nothing() -> None:
    assert stream(b"abc", [], ["", ""]) == ("abc", None)
