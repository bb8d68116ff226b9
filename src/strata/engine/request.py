"""One running request inside the engine: its prompt, what it wrote so far, and when it must end; pauses between.

Holds no state of the K/V pool (that is `slots.py`) and makes no decisions about steps (that is `loop.py`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from strata.engine.protocol import Finished, Run, Timing, unpack_tokens
from strata.engine.text import TextStream

if TYPE_CHECKING:
    from strata.engine.llama import Sampler


class Request:
    """Reads `tokens[keep:]`, then writes. `last` is the sampled token that is not in the slot yet.

    `tokens`: its prompt; after a pause, with what it wrote before that, which is read again.
    """

    def __init__(self, command: Run, slot_limit: int) -> None:
        self.number = command.request
        self.slot = command.slot
        self.tokens = unpack_tokens(command.tokens)
        self.ignores_end = command.ignore_eos
        self.checkpoints = frozenset(command.checkpoints)
        self.hold_end = command.hold_end
        self.text = TextStream(command.stop)
        self.sampler: Sampler | None = None
        self.is_writing = False
        self.last = -1
        self._keep = command.keep
        self._most = min(command.max_tokens, min(command.limit, slot_limit) - len(self.tokens))
        self._written = 0
        self._fresh: list[int] = []  # written, and not in `tokens`
        self._since = 0.0  # when it began to do what it does now; 0: it has not begun
        self._read_s = self._write_s = 0.0
        self._read_tokens = 0

    def __repr__(self) -> str:
        state = f"wrote {self._written}" if self.is_writing else "reading"
        return f"Request({self.number} in slot {self.slot}, {len(self.tokens)} prompt tokens, {state})"

    @property
    def left(self) -> int:
        """Tokens it may still write: bounded by max_tokens, and by what prompt and reply may take together."""
        return self._most - self._written

    def next_stop(self, held: int) -> int:
        """Where reading must stop next: at a checkpoint, or at the end of the prompt."""
        return min((at for at in self.checkpoints if at > held), default=len(self.tokens))

    def begin_reading(self) -> None:
        self._since = self._since or time.perf_counter()

    def begin_writing(self) -> None:
        self._count(len(self.tokens))
        self.is_writing = True
        self._since = time.perf_counter()

    def _count(self, held: int) -> None:
        """What it does ends now: add the time, and the tokens read, to what there was before."""
        if not self._since:
            return
        seconds = time.perf_counter() - self._since
        if self.is_writing:
            self._write_s += seconds
        else:
            self._read_s += seconds
            self._read_tokens += min(held, len(self.tokens)) - self._keep
        self._since = 0.0

    def pause(self, held: int) -> None:
        """Stand still with [0, held) in the slot. Checkpoints up to there were taken."""
        self._count(held)
        self.checkpoints = frozenset(at for at in self.checkpoints if at > held)
        self.tokens = np.concatenate([self.tokens, np.array(self._fresh, np.int32)])
        self._fresh = []
        self.is_writing = False

    def resume(self, keep: int) -> None:
        """Go on in a slot that holds [0, keep)."""
        self._keep = keep

    def take(self, token: int, piece: bytes) -> str:
        """Count a sampled token; the text that became certain with it."""
        self.last = token
        self._fresh.append(token)
        self._written += 1
        return self.text.feed(piece)

    def finished(self, reason: str, held: int) -> Finished:
        self._count(held)
        timing = Timing(
            read_s=self._read_s,
            read_tokens=self._read_tokens,
            write_s=self._write_s,
            write_tokens=self._written,
        )
        return Finished(
            request=self.number,
            reason=reason,
            held=held,
            timing=timing,
            text=self.text.finish(),
            stop_string=self.text.stop_string,
        )
