"""Prompts to tokens, each in time of what is new in it: what it shares with a recent prompt is not tokenised again.

A prompt is tokenised from the last cut (cutting.py) in front of where it leaves a recent one; the tokens are exactly
those of the whole text. Recent prompts are kept by owner, in memory only: at most MOST_PROMPTS of them, MOST_BYTES in
all, and none that is quickly tokenised anyway. What one owner sent never makes another's prompt faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from strata.engine.cutting import Cuts, Cutter
from strata.types import MIB, Tokens

MOST_PROMPTS = 64
MOST_BYTES = 64 * MIB
LEAST_BYTES = 4096
"""Shorter prompts are not kept: they take a millisecond or two, and would push out long ones."""
CUTTABLE = frozenset({"llama", "gpt2", "gemma4"})
"""Kinds of tokenizers (tokenizer.ggml.model) whose stretches between special tokens know nothing of each other."""
_COMPARED_BYTES = 1 << 16


class Tokenizer(Protocol):
    """What is needed of llama.Vocabulary."""

    n_tokens: int
    bos: int
    adds_bos: bool

    def tokenize(self, text: bytes) -> Tokens: ...

    def specials(self) -> Mapping[int, bytes]: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Known:
    """A recent prompt. `tokens` without an added BOS."""

    owner: str
    text: bytes
    tokens: Tokens
    cuts: Cuts

    @property
    def nbytes(self) -> int:
        return len(self.text) + self.tokens.nbytes + self.cuts.nbytes

    def __repr__(self) -> str:
        return f"Known({len(self.text)} bytes, {len(self.tokens)} tokens, {len(self.cuts.offsets)} cuts)"


class Prompts:
    """Tokenises prompts and remembers them. `kind`: the vocabulary's tokenizer.ggml.model. Belongs to one thread."""

    def __init__(self, vocabulary: Tokenizer, kind: str | None) -> None:
        self._vocabulary = vocabulary
        self._cutter = Cutter(vocabulary.specials(), vocabulary.n_tokens) if kind in CUTTABLE else None
        self._known: list[Known] = []  # the least recently used first

    def __repr__(self) -> str:
        return f"Prompts({len(self._known)} kept, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        return sum(known.nbytes for known in self._known)

    def tokenize(self, text: str, owner: str | None) -> tuple[Tokens, int]:
        """The prompt's tokens, and how many of them an earlier prompt of `owner` gave.

        The vocabulary's BOS is there exactly once, whether `text` writes it or not. `owner` None: nothing is taken from
        earlier prompts, and this one is not kept.
        """
        data = text.encode(errors="replace")
        if owner is None or self._cutter is None:
            return self._with_bos(self._vocabulary.tokenize(data)), 0
        known, shared = self._nearest(data, owner)
        new, reused = self._from_the_last_cut(data, owner, self._cutter, known, shared)
        if known is not None:
            self._known.remove(known)
            if shared == len(data) or shared < len(known.text):
                self._known.append(known)  # used now; one that `data` goes on with is not needed any more
        if shared < len(data):
            self._keep(new)
        return self._with_bos(new.tokens), reused

    def _nearest(self, data: bytes, owner: str) -> tuple[Known | None, int]:
        """The known prompt with the longest part that need not be tokenised again, and how many bytes it shares."""
        best: Known | None = None
        best_shared = best_reach = 0
        for known in self._known:
            if known.owner != owner:
                continue
            shared = shared_bytes(known.text, data)
            n = known.cuts.last_within(shared)
            reach = int(known.cuts.offsets[n - 1]) if n else 0
            if reach > best_reach:
                best, best_shared, best_reach = known, shared, reach
        return best, best_shared

    def _from_the_last_cut(
        self, data: bytes, owner: str, cutter: Cutter, known: Known | None, shared: int
    ) -> tuple[Known, int]:
        if known is None:
            tokens = self._vocabulary.tokenize(data)
            return Known(owner=owner, text=data, tokens=tokens, cuts=cutter.find(data, tokens)), 0
        last = known.cuts.last_within(shared) - 1
        offset, index = int(known.cuts.offsets[last]), int(known.cuts.indexes[last])
        rest = self._vocabulary.tokenize(data[offset:])
        cuts = known.cuts.then(last, cutter.find(data[offset:], rest), offset=offset, index=index)
        return Known(owner=owner, text=data, tokens=np.concatenate([known.tokens[:index], rest]), cuts=cuts), index

    def _keep(self, new: Known) -> None:
        is_of_use = len(new.cuts.offsets) and new.cuts.offsets[-1] > 0
        if not is_of_use or len(new.text) < LEAST_BYTES or new.nbytes > MOST_BYTES:
            return
        self._known.append(new)
        while len(self._known) > MOST_PROMPTS or self.nbytes > MOST_BYTES:
            del self._known[0]

    def _with_bos(self, tokens: Tokens) -> Tokens:
        if self._vocabulary.adds_bos and not (len(tokens) and tokens[0] == self._vocabulary.bos):
            return np.concatenate([np.array([self._vocabulary.bos], np.int32), tokens])
        return tokens


def shared_bytes(a: bytes, b: bytes) -> int:
    """Number of leading bytes that `a` and `b` have in common."""
    n, at = min(len(a), len(b)), 0
    while at < n and a[at : at + _COMPARED_BYTES] == b[at : at + _COMPARED_BYTES]:
        at += _COMPARED_BYTES
    if at >= n:
        return n
    left = min(_COMPARED_BYTES, n - at)
    differ = np.flatnonzero(np.frombuffer(a, np.uint8, left, at) != np.frombuffer(b, np.uint8, left, at))
    return at + (int(differ[0]) if differ.size else left)
