"""What each slot holds, and moving rows in and out of it: trim, fork, capture and apply.

A refused operation is an outcome (the reason as text, None when it was done) and leaves the slot as `held` says; a
range that makes no sense raises ValueError. Memory that cannot be cut needs a checkpoint behind its rows
(`checkpoints.py`); until then its slot is `bare`. Captures and applies go through the transfer sequence, which is
always emptied again. Which requests run is `loop.py`'s concern; so is when a block may be moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from strata.engine.layout import BadState, Bytes, Words
from strata.engine.llama import last_errors
from strata.engine.pool_messages import POOL_IS_FULL
from strata.engine.ranges import RangeFormat
from strata.types import StageShape, Tokens, pad_to_page

_BLOB_HEAD_BYTES = 8  # magic and sequence id
_NO_CELLS = "available cells"  # in what llama.cpp logs when a state does not fit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from strata.engine.llama import Context

Refusal = str | None
"""Why an operation was refused; None when it was done."""


class Slots:
    """The slots of one context. `format` and `stages` are None and empty when blocks cannot be moved."""

    def __init__(
        self,
        context: Context,
        count: int,
        limit: int,
        *,
        cuttable: bool,
        window: int = 0,
        format: RangeFormat | None = None,  # noqa: A002
        stages: Sequence[StageShape] = (),
    ) -> None:
        self.held = [0] * count
        """Positions [0, held) that each slot holds."""
        self.bare: set[int] = set()
        """Slots that hold rows whose checkpoint has not been applied: nothing can be decoded behind them."""
        self.limit = limit
        self._context = context
        self._cuttable = cuttable
        self._window = window
        self._format = format
        self._stages = tuple(stages)
        self._scratch: Bytes = np.empty(0, np.uint8)
        self._forks: set[frozenset[int]] = set()  # slots that may share cells, two and two

    def check(self, slot: int) -> None:
        if not 0 <= slot < len(self.held):
            raise ValueError(f"slot {slot} does not exist; there are {len(self.held)}")

    @property
    def has_rows(self) -> bool:
        """Whether blocks of rows can be moved."""
        return self._format is not None

    def is_proved(self, slot: int, n: int) -> bool:
        """Whether llama.cpp holds exactly what going on at position `n` needs, as far as it can be asked."""
        context = self._context
        if context.last_position(slot) != n - 1 or not self._covers(slot, n):
            return False
        fmt = self._format
        if fmt is None or not fmt.tail:
            return True
        # the rows are not in the positions of a window: count them
        rows = fmt.head_bytes(n) + fmt.body_bytes(n) - _BLOB_HEAD_BYTES
        rows += 4 * (context.streams - 1)  # the counts of the others
        return context.state_size(slot) - context.state_size(slot, checkpoint=True) == rows

    def _covers(self, slot: int, n: int) -> bool:
        """Whether the window behind position `n` is there."""
        if not self._window or not n:
            return True
        return 0 <= self._context.first_position(slot) <= max(0, n - self._window + 1)

    def settle(self, slot: int) -> Refusal:
        """Put what was applied where llama.cpp can use it, if it is not there yet (streams.py)."""
        self.check(slot)
        return None

    def note_held(self, slot: int, n: int) -> None:
        """A checkpoint made the slot hold exactly positions [0, n)."""
        self.held[slot] = n
        self.bare.discard(slot)

    # ---------------------------------------------------------------------------------------------- metadata operations

    def trim(self, slot: int, n: int) -> Refusal:
        """Keep positions [0, n)."""
        self.check(slot)
        held = self.held[slot]
        if not 0 <= n <= held:
            return f"slot {slot} holds {held} tokens, not {n}"
        if n and slot in self.bare:
            return f"slot {slot} holds rows without their checkpoint"
        if n == held:
            return None
        if n and not self._covers(slot, n):
            return f"this model's memory cannot be cut from {held} to {n} tokens: their window is gone"
        if not self._context.remove(slot, n) or self._context.last_position(slot) != n - 1:
            return f"this model's memory cannot be cut from {held} to {n} tokens"
        self.held[slot] = n
        self.bare.discard(slot)
        if not n:
            self._forks = {pair for pair in self._forks if slot not in pair}
        return None

    def fork(self, source: int, target: int, n: int) -> Refusal:
        """Let `target` hold positions [0, n) of `source`, and nothing else."""
        self.check(source)
        self.check(target)
        if source == target:
            raise ValueError(f"slot {source} cannot be forked into itself")
        held = self.held[source]
        if not 0 <= n <= held:
            return f"slot {source} holds {held} tokens, not {n}"
        if n and source in self.bare:
            return f"slot {source} holds rows without their checkpoint"
        if n not in (0, held) and not self._cuttable:
            return f"this model's memory can only be shared whole ({held} tokens), not up to {n}"
        self.clear(target)
        if n:
            self.copy(source, target, n)
            if self._context.last_position(target) != n - 1 or not self._covers(target, n):
                self.clear(target)
                return f"slot {target} did not take {n} tokens of slot {source}"
            self.held[target] = n
            self._forks.add(frozenset((source, target)))
        return None

    def copy(self, source: int, target: int, n: int) -> None:
        """Give an empty slot positions [0, n) of another one: here, by sharing its cells."""
        self._context.share(source, target, 0, n)

    def clear(self, slot: int) -> None:
        self._context.remove(slot)
        self.held[slot] = 0
        self._forks = {pair for pair in self._forks if slot not in pair}
        self.bare.discard(slot)

    def repair(self, slot: int) -> None:
        """Bring a slot back to `held` after a failed decode; one whose memory cannot be cut loses everything."""
        held = self.held[slot]
        if slot in self.bare:
            return
        if self._context.last_position(slot) != held - 1:
            self._context.remove(slot, held)
        if self._context.last_position(slot) != held - 1 or not self._covers(slot, held):
            self.clear(slot)

    # ------------------------------------------------------------------------------------------------------- compaction

    def compact(self, slot: int, start: int, end: int) -> Refusal:
        """Move the rows of [start, end), as far as they are held, into the first free cells.

        They are in the new cells before they leave the old ones, so a refusal changes nothing.
        """
        self.check(slot)
        fmt, context = self._format, self._context
        if fmt is None or fmt.tail:
            return "rows of this model's memory cannot be moved"
        if not 0 <= start < end <= start + fmt.block_tokens:
            raise ValueError(f"[{start}, {end}) is not a block of at most {fmt.block_tokens} tokens")
        end = min(end, self.held[slot])
        if start >= end:
            return None
        if any(slot in pair for pair in self._forks):
            return f"slot {slot} shares cells with another"
        blob = self._scratch_of(fmt.head_bytes(end - start) + fmt.body_bytes(end - start))
        with self._transfer():
            context.share(slot, context.transfer, start, end)
            if context.state_get(context.transfer, blob) != len(blob):
                return f"the state of [{start}, {end}) has not {len(blob)} bytes"
            if not context.state_set(blob):
                return POOL_IS_FULL
            context.remove(slot, start, end)
            context.share(context.transfer, slot, start, end)
        return None

    # ----------------------------------------------------------------------------------------------------------- blocks

    def capture(self, slot: int, start: int, end: int, spans: Sequence[Bytes]) -> Refusal:
        """Write the canonical state of positions [start, end) into one span per stage."""
        fmt, n = self._checked_block(slot, start, end, spans, self._stages)
        if end > self.held[slot]:
            return f"slot {slot} holds {self.held[slot]} tokens, not {end}"
        head_bytes = fmt.head_bytes(n)
        blob = self._blob(fmt, n, spans, self._stages)
        with self._transfer():
            self._context.share(slot, self._context.transfer, start, end)
            if fmt.has_recurrent:  # an empty sequence's share of nothing replaces that of the slot's recurrent state
                self._context.share(self._context.empty, self._context.transfer, 0, 1)
            size = self._context.state_get(self._context.transfer, blob)
        tail = head_bytes + fmt.body_bytes(n)
        if not tail <= size or not fmt.fits_tail(blob[tail:size]):
            return f"the state of [{start}, {end}) has {size} bytes, not {tail} and {len(fmt.tail)}"
        try:
            order, extra = fmt.read_head(blob[:head_bytes], start)
        except BadState as error:
            return f"the state of [{start}, {end}) is not usable: {error}"
        body = blob[head_bytes:tail]
        if order is not None:
            fmt.reorder(body, order)
        for stage, span in zip(self._stages, spans, strict=True):
            self._fill_span(fmt, stage, span, body, extra, n)
        return None

    def _fill_span(
        self, fmt: RangeFormat, stage: StageShape, span: Bytes, body: Bytes, extra: Words | None, n: int
    ) -> None:
        """Put a stage's payload where it belongs (it lies there already with one stage) and zero the padding."""
        payload_bytes = stage.payload_bytes(n)
        payload = span[fmt.head_room : fmt.head_room + payload_bytes]
        if not _in_place(fmt, self._stages):
            k, v = fmt.sections(stage, n)
            k_bytes = k.stop - k.start
            payload[:k_bytes] = body[k]
            payload[k_bytes : k_bytes + v.stop - v.start] = body[v]
        if extra is not None:
            payload[payload_bytes - extra.nbytes :] = np.ascontiguousarray(extra).view(np.uint8).reshape(-1)
        span[fmt.head_room + payload_bytes : fmt.head_room + pad_to_page(payload_bytes)] = 0

    def apply(
        self,
        slot: int,
        start: int,
        end: int,
        from_: int,
        upto: int,
        spans: Sequence[Bytes],
        tokens: Tokens,
        stages: Sequence[StageShape] = (),
    ) -> Refusal:
        """Use positions [from_, upto) of a captured block [start, end): the slot then holds [0, upto).

        `stages`: of the split that the block was captured in; empty: of this one.
        """
        stages = stages or self._stages
        found = self._block_to_apply(slot, start, end, from_, upto, spans, tokens, stages)
        if isinstance(found, str):
            return found
        fmt, n, extra = found
        head_bytes = fmt.head_bytes(n)
        end_of_body = head_bytes + fmt.body_bytes(n)
        blob = self._blob(fmt, n, spans, stages)[: end_of_body + len(fmt.tail)]
        fmt.write_head(blob[:head_bytes], start, extra)
        if not _in_place(fmt, stages):
            self._gather(fmt, blob[head_bytes:end_of_body], spans, n, stages)
            blob[end_of_body:] = np.frombuffer(fmt.tail, np.uint8)
        with self._transfer():
            if not self._context.state_set(blob):
                no_cells = _NO_CELLS in last_errors()
                return POOL_IS_FULL if no_cells else f"llama.cpp refused the state of [{start}, {end})"
            self._context.share(self._context.transfer, slot, from_, upto)
        if fmt.tail:  # sharing has dropped what the slot had besides rows
            self.bare.add(slot)
        elif self._context.last_position(slot) != upto - 1:
            self.repair(slot)
            return f"slot {slot} did not take [{from_}, {upto})"
        self.held[slot] = upto
        return None

    def _block_to_apply(
        self,
        slot: int,
        start: int,
        end: int,
        from_: int,
        upto: int,
        spans: Sequence[Bytes],
        tokens: Tokens,
        stages: Sequence[StageShape],
    ) -> tuple[RangeFormat, int, Words | None] | str:
        """The format, cells and extra words of a block that can be applied, or why it cannot."""
        if self._format is not None and not self._format.is_split(stages):
            return f"the stages of [{start}, {end}) are not a split of this model's layers"
        fmt, n = self._checked_block(slot, start, end, spans, stages)
        if not start <= from_ < upto <= end:
            raise ValueError(f"[{from_}, {upto}) does not lie in the block [{start}, {end})")
        if len(tokens) != n:
            raise ValueError(f"{len(tokens)} tokens for a block of {n}")
        if self.held[slot] != from_:
            return f"slot {slot} holds {self.held[slot]} tokens, not {from_}"
        if upto > self.limit:
            return f"{upto} tokens exceed the slot's {self.limit}"
        extra = self._extra(fmt, stages[0], spans[0], n)
        if extra is not None and not np.array_equal(extra[:, 2], tokens):
            return f"the block [{start}, {end}) was captured of other tokens"
        return fmt, n, extra

    @staticmethod
    def _gather(fmt: RangeFormat, body: Bytes, spans: Sequence[Bytes], n: int, stages: Sequence[StageShape]) -> None:
        for stage, span in zip(stages, spans, strict=True):
            k, v = fmt.sections(stage, n)
            k_bytes, v_bytes = k.stop - k.start, v.stop - v.start
            payload = span[fmt.head_room : fmt.head_room + k_bytes + v_bytes]
            body[k] = payload[:k_bytes]
            body[v] = payload[k_bytes:]

    @staticmethod
    def _extra(fmt: RangeFormat, stage: StageShape, span: Bytes, n: int) -> Words | None:
        """The extra words of a block's cells, (cells, 3): every stage carries them behind its rows."""
        if not fmt.cells.extra:
            return None
        end = fmt.head_room + stage.payload_bytes(n)
        return np.frombuffer(span[end - 12 * n : end].tobytes(), "<i4").reshape(n, 3)

    def _blob(self, fmt: RangeFormat, n: int, spans: Sequence[Bytes], stages: Sequence[StageShape]) -> Bytes:
        """Where a whole blob of `n` cells goes: in the span around its payload, or in scratch."""
        head_bytes, body_bytes = fmt.head_bytes(n), fmt.body_bytes(n)
        if _in_place(fmt, stages):
            return spans[0][fmt.head_room - head_bytes : fmt.head_room + body_bytes]
        return self._scratch_of(head_bytes + body_bytes + fmt.most_tail_bytes(n))

    def _scratch_of(self, size: int) -> Bytes:
        if len(self._scratch) < size:
            self._scratch = np.empty(size, np.uint8)
        return self._scratch[:size]

    def _checked_block(
        self, slot: int, start: int, end: int, spans: Sequence[Bytes], stages: Sequence[StageShape]
    ) -> tuple[RangeFormat, int]:
        self.check(slot)
        if self._format is None:
            raise ValueError("blocks of this model's memory cannot be moved")
        n = end - start
        if start < 0 or not 0 < n <= self._format.block_tokens:
            raise ValueError(f"[{start}, {end}) is not a block of at most {self._format.block_tokens} tokens")
        if len(spans) != len(stages):
            raise ValueError(f"{len(spans)} spans for {len(stages)} stages")
        for stage, span in zip(stages, spans, strict=True):
            needed = self._format.head_room + pad_to_page(stage.payload_bytes(n))
            if len(span) < needed:
                raise ValueError(f"a span of {len(span)} bytes where {needed} are needed")
        return self._format, n

    @contextmanager
    def _transfer(self) -> Iterator[None]:
        """The transfer sequence for one move; emptied whatever happens."""
        try:
            yield
        finally:
            self._context.remove(self._context.transfer)


def _in_place(fmt: RangeFormat, stages: Sequence[StageShape]) -> bool:
    """Whether a payload lies in its span as in a blob: one stage, and nothing behind its rows."""
    return len(stages) == 1 and not fmt.tail
