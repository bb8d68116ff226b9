"""One running request inside the engine: its prompt, what it wrote so far, and when it must end.

Holds no state of the K/V pool (that is `slots.py`) and makes no decisions about steps (that is `loop.py`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from strata.engine.protocol import Finished, Run, Timing, unpack_tokens
from strata.engine.text import TextStream

if TYPE_CHECKING:
    from strata.engine.llama import Sampler


class Request:
    """Reads `tokens[keep:]`, then writes. `last` is the sampled token that is not in the slot yet."""

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
        self._read_began = self._read_ended = 0.0

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
        self._read_began = self._read_began or time.perf_counter()

    def begin_writing(self) -> None:
        self.is_writing = True
        self._read_ended = time.perf_counter()

    def take(self, token: int, piece: bytes) -> str:
        """Count a sampled token; the text that became certain with it."""
        self.last = token
        self._written += 1
        return self.text.feed(piece)

    def finished(self, reason: str, held: int) -> Finished:
        now = time.perf_counter()
        read_end = self._read_ended or now
        read_began = self._read_began or now
        timing = Timing(
            read_s=read_end - read_began,
            read_tokens=min(held, len(self.tokens)) - self._keep if self._read_began else 0,
            write_s=now - read_end,
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
