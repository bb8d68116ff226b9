"""Deterministic prose for prompts: plausible enough that a tokenizer treats it like text."""

from __future__ import annotations

import random

_SUBJECTS = [
    "The harbour",
    "A quiet clerk",
    "Our second engineer",
    "The old museum",
    "Every gardener",
    "One careful pilot",
]
_VERBS = ["describes", "repairs", "remembers", "measures", "forgets", "carries"]
_OBJECTS = [
    "the copper lamp",
    "a long letter",
    "seven blue crates",
    "the northern road",
    "an empty ledger",
    "the winter map",
]
_PLACES = [
    "near the river",
    "before noon",
    "without a word",
    "in heavy rain",
    "behind the station",
    "at the second gate",
]


def prose(n_sentences: int, seed: int) -> str:
    """About 14 tokens per sentence with SmolLM2's vocabulary."""
    rng = random.Random(seed)
    lines = (
        f"{rng.choice(_SUBJECTS)} {rng.choice(_VERBS)} {rng.choice(_OBJECTS)} {rng.choice(_PLACES)}, note {i}."
        for i in range(n_sentences)
    )
    return " ".join(lines)
