"""What the text of a setting may be: the kinds of values, each with its parser and the words that describe it.

Covers one value at a time. Which settings there are is in config.py, where their text comes from in sources.py, and
what they may not be together in coherence.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.rules.stages import MOST_PARTS

KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How the text of a setting becomes a value: `parse` raises ValueError, `expects` completes "it must be ..."."""

    metavar: str
    expects: str
    parse: Callable[[str], Any]


def whole(low: int, high: int, *, auto: bool = False) -> Kind:
    """A decimal number in [low, high]; with `auto` also the word "auto", which means None."""

    def parse(text: str) -> int | None:
        if auto and text == "auto":
            return None
        # int() alone would accept "1_000", " 7" and other digits than 0-9.
        if not re.fullmatch(r"-?[0-9]{1,18}", text) or not low <= int(text) <= high:
            raise ValueError
        return int(text)

    expects = f"a whole number from {low} to {high}" + (' or "auto"' if auto else "")
    return Kind(metavar="N", expects=expects, parse=parse)


def choice(*words: str) -> Kind:
    expects = "one of " + ", ".join(words)
    return Kind(metavar="|".join(words), expects=expects, parse=lambda text: words[words.index(text)])


def _parse_fraction(text: str) -> float:
    if not re.fullmatch(r"[0-9]*\.?[0-9]+([eE]-[0-9]{1,2})?", text) or not 0 <= float(text) < 1:
        raise ValueError
    return float(text)


def _parse_switch(text: str) -> bool:
    words = {"": False, "0": False, "false": False, "off": False, "no": False}
    words |= {"1": True, "true": True, "on": True, "yes": True}
    if text.lower() not in words:
        raise ValueError
    return words[text.lower()]


def _parse_path(text: str) -> Path | None:
    """An absolute path without "..", links kept as they are; None for "", which means not set."""
    if "\0" in text:
        raise ValueError
    return Path(os.path.abspath(Path(text).expanduser())) if text else None  # noqa: PTH100 resolve() would follow links


def _parse_file(text: str) -> Path:
    path = _parse_path(text)
    if path is None:  # an empty variable behind --api-key-file must not mean "no keys"
        raise ValueError
    return path


def _parse_model(text: str) -> str:
    if not text or text.startswith("hf:"):
        raise ValueError
    return text if text == "demo" else str(_parse_path(text))


def _parse_kv(text: str) -> tuple[str, str]:
    parts = text.split(",")
    if not 1 <= len(parts) <= 2 or not all(part in KV_TYPES for part in parts):
        raise ValueError
    return parts[0], parts[-1]


def _parse_split(text: str) -> tuple[float, ...] | None:
    """Proportions; None for "auto"."""
    if text == "auto":
        return None
    parts = text.split(",")
    if len(parts) > MOST_PARTS or not all(re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", part) for part in parts):
        raise ValueError
    split = tuple(map(float, parts))
    if not sum(split):
        raise ValueError
    return split


def _parse_turn_token(text: str) -> str:
    return text if text in ("auto", "none") else str(whole(0, 2**31 - 1).parse(text))


def _matching(pattern: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError
        return text

    return parse


SHARE = Kind(
    metavar="F|auto",
    expects='a number from 0 up to, but not including, 1, or "auto"',
    parse=lambda text: None if text == "auto" else _parse_fraction(text),
)
FRACTION = Kind(metavar="F", expects="a number from 0 up to, but not including, 1", parse=_parse_fraction)
SWITCH = Kind(metavar="on|off", expects="one of 1, true, on, yes, 0, false, off, no", parse=_parse_switch)
FOLDER = Kind(metavar="DIR", expects="a path", parse=_parse_path)
FILE = Kind(metavar="FILE", expects="the path of a file", parse=_parse_file)
MODEL = Kind(
    metavar="PATH|demo",
    expects='the path of a GGUF file, or "demo" (hf:REPO/FILE is not in this version)',
    parse=_parse_model,
)
KV = Kind(metavar="TYPE[,TYPE]", expects="one type, or two as K,V, out of " + ", ".join(KV_TYPES), parse=_parse_kv)
SPLIT = Kind(
    metavar="A,B,..|auto",
    expects=f'at most {MOST_PARTS} numbers from 0, not all of them 0, as A,B,.., or "auto"',
    parse=_parse_split,
)
TURN_TOKEN = Kind(metavar="ID|auto|none", expects='"auto", "none" or a token id', parse=_parse_turn_token)
HOST = Kind(metavar="HOST", expects="a host name or an IP address", parse=_matching(r"[A-Za-z0-9._:%-]+"))
TEXT = Kind(metavar="TEXT", expects="at most 200 printable ASCII characters", parse=_matching(r"[\x20-\x7e]{0,200}"))
KEY = Kind(metavar="KEY", expects="printable ASCII without spaces", parse=_matching(r"[\x21-\x7e]+"))
