"""Where a text may be cut so that its pieces, tokenised one by one, give the tokens of the whole. Pure.

llama.cpp first takes special tokens out of a text, longer ones before shorter ones, and then tokenises every stretch
in between by itself. So the text in front of a special token and the text from it on do not influence each other,
provided that it is found there whatever stands around it. That holds for a *clean* one: no special token, itself
included, can be written so that it overlaps it and reaches beyond it, and it has no white space at its ends, which
others may swallow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strata.types import Tokens

MOST_KINDS = 8
"""A text is searched for so many different special tokens at most, the most frequent ones."""

Positions = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """Places in front of special tokens, ascending, each an array of shape (n,).

    `offsets`: bytes in front of it; `ends`: up to where the text must be the same for the cut to hold; `indexes`:
    tokens in front of it.
    """

    offsets: Positions
    ends: Positions
    indexes: Positions

    @property
    def nbytes(self) -> int:
        return self.offsets.nbytes + self.ends.nbytes + self.indexes.nbytes

    def last_within(self, n_bytes: int) -> int:
        """How many cuts hold when the first `n_bytes` of the text are the same."""
        return int(np.searchsorted(self.ends, n_bytes, side="right"))

    def then(self, n: int, other: Cuts, *, offset: int, index: int) -> Cuts:
        """The first `n` of these, then `other`, whose text and tokens begin at `offset` and `index` of this one."""
        return Cuts(
            offsets=np.concatenate([self.offsets[:n], other.offsets + offset]),
            ends=np.concatenate([self.ends[:n], other.ends + offset]),
            indexes=np.concatenate([self.indexes[:n], other.indexes + index]),
        )


class Cutter:
    """Finds the cuts of tokenised texts. `written`: every special token of the vocabulary, as a text writes it."""

    def __init__(self, written: Mapping[int, bytes], n_tokens: int) -> None:
        self._written = written
        self._is_special = np.zeros(n_tokens, np.bool_)
        self._is_special[list(written)] = True
        self._clean: dict[int, bool] = {}

    def is_clean(self, token: int) -> bool:
        """Whether this special token is found wherever it is written."""
        if token not in self._clean:
            self._clean[token] = _stands_alone(self._written[token], self._written.values())
        return self._clean[token]

    def find(self, text: bytes, tokens: Tokens) -> Cuts:
        """The cuts of `text`, whose tokens are `tokens`."""
        kinds, counts = np.unique(tokens[self._is_special[tokens]], return_counts=True)
        offsets, ends, indexes = [_NONE], [_NONE], [_NONE]
        for kind in kinds[np.argsort(-counts, kind="stable")][:MOST_KINDS].tolist():
            if not self.is_clean(kind):
                continue
            at = _occurrences(text, self._written[kind])
            found = np.flatnonzero(tokens == kind)
            # more tokens than occurrences: some were made of ordinary text, and nobody knows which
            if len(at) == len(found):
                offsets.append(at)
                ends.append(at + len(self._written[kind]))
                indexes.append(found)
        order = np.argsort(np.concatenate(offsets), kind="stable")
        return Cuts(
            offsets=np.concatenate(offsets)[order],
            ends=np.concatenate(ends)[order],
            indexes=np.concatenate(indexes)[order],
        )


_NONE: Positions = np.empty(0, np.int64)


def _stands_alone(text: bytes, others: Iterable[bytes]) -> bool:
    """Whether no text of `others` (of which `text` is one) can overlap `text` and reach beyond it."""
    if not text or text[:1].isspace() or text[-1:].isspace():
        return False
    heads = tuple(text[:n] for n in range(1, len(text) + 1))
    tails = tuple(text[n:] for n in range(1, len(text)))
    return not any(
        other[1:].endswith(heads) or other[:-1].startswith(tails) or (text in other and text != other)
        for other in others
    )


def _occurrences(text: bytes, wanted: bytes) -> Positions:
    """Where `wanted` begins in `text`."""
    found, at = [], text.find(wanted)
    while at >= 0:
        found.append(at)
        at = text.find(wanted, at + len(wanted))
    return np.array(found, np.int64)
