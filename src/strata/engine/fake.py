"""An engine without a model, for tests of the layers above: deterministic, in process, with real bytes in the arena.

The state of a position is a hash of every token up to it, and the next token is a function of the last state. A capture
writes the states of its range into the spans; an apply takes what it finds there, so a wrong restore changes what is
generated afterwards, and is counted in `wrong_restores`. Text is bytes: token = byte + 10; 1 opens a turn, 2 ends one.

`memory` chooses what it can be parked as: "segments" (rows), "checkpoints" (rows and a checkpoint), "recurrent"
(checkpoints only; mode "checkpoints" without stages) or "opaque" (the same, mode "opaque").
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from strata.engine.fake_model import (
    BASE_BYTES,
    FIRST_BYTE,
    STATE_BYTES,
    fake_info,
    next_state,
    text_tokens,
    turn,
)
from strata.engine.protocol import (
    Delta,
    Done,
    Finished,
    Held,
    Paused,
    Prepared,
    Progress,
    Run,
    Timing,
    pack_tokens,
    unpack_tokens,
)
from strata.engine.text import TextStream
from strata.errors import BadRequest, EngineGone, EngineRefused, RunError
from strata.rules.stages import is_split
from strata.store.arena import Arena
from strata.types import BLOCK_BYTES, PAGE, SEGMENT_TOKENS, Span, StageShape, Tokens, pad_to_page

CHECKPOINT_HEAD_BYTES = 8 + STATE_BYTES  # position, last state; zeros behind it
_END_ONE_IN = 64


@dataclass(frozen=True, slots=True)
class FakeCheckpoint:
    position: int
    state: bytes


class FakeEngine:
    """Implements interface.Engine. `kill` ends the "process": running requests fail, every slot is empty afterwards."""

    def __init__(
        self,
        arena: Arena,
        *,
        slots: int = 2,
        context: int = 4096,
        stages: int = 1,
        memory: str = "segments",
        checkpoint_bytes: int = 10_000,
    ) -> None:
        self.info = fake_info(
            slots=slots, context=context, stages=stages, memory=memory, checkpoint_bytes=checkpoint_bytes
        )
        self.bare: set[int] = set()
        self.held_checkpoints: dict[int, FakeCheckpoint] = {}
        self._checkpoint_ids = 0
        self._arriving: dict[int, bytes] = {}
        self.generation = 1
        self.wrong_restores = 0
        self.read_token_s = 0.0  # what a request says that it took to read a token
        self.running: dict[int, FakeRun] = {}  # by slot
        self.states: list[list[bytes]] = [[] for _ in range(slots)]
        self.compacted: list[tuple[int, int, int]] = []  # slot, start, end
        self._arena = arena
        self._requests = 0

    @property
    def is_serving(self) -> bool:
        return bool(self.running)

    def kill(self) -> None:
        self.generation += 1
        self.running.clear()
        self.bare.clear()
        self.held_checkpoints.clear()
        self.states = [[] for _ in self.states]

    def pause(self, slot: int) -> None:
        """As if the pool were full: the request that runs in `slot` pauses at its next step."""
        self.running[slot].pauses = True

    async def prepare(
        self, *, messages_json: bytes | None = None, text: str | None = None, owner: str | None = None
    ) -> Prepared:
        parts = [text_tokens(text or "")]
        if messages_json is not None:
            try:
                messages = msgspec.json.decode(messages_json, type=list[dict[str, str]])
                parts = [turn(f"{m['role']}\n{m['content']}") for m in messages]
            except (msgspec.DecodeError, msgspec.ValidationError, KeyError) as error:
                raise BadRequest(str(error), field="messages") from error
            parts.append(turn("assistant\n")[:-1])
        return Prepared(job=0, tokens=pack_tokens(np.concatenate(parts)), render_s=0.0, tokenize_s=0.0)

    async def detokenize(self, tokens: Tokens) -> str:
        return bytes(int(t) - FIRST_BYTE for t in tokens if t >= FIRST_BYTE).decode(errors="replace")

    def run(self, command: Run) -> FakeRun:
        self._requests += 1
        return FakeRun(self, msgspec.structs.replace(command, request=self._requests))

    async def fork(self, source: int, target: int, n: int, checkpoint: int | None = None) -> Done:
        if target in self.running or not 0 <= n <= len(self.states[source]):
            return self._done(target, "target is busy or source is shorter")
        held = self.held_checkpoints.get(checkpoint or 0)
        if not self._can_stop(source, n) and (held is None or held.position != n):
            return self._done(target, "this memory cannot be cut there")
        self.states[target] = self.states[source][:n]
        self.bare.discard(target)
        return self._done(target)

    def _can_stop(self, slot: int, n: int) -> bool:
        """Whether a slot can go on at `n` with what it has."""
        return not n or self.info.cuttable or (n == len(self.states[slot]) and slot not in self.bare)

    async def trim(self, slot: int, n: int) -> Done:
        if slot in self.running or not 0 <= n <= len(self.states[slot]):
            return self._done(slot, "busy or shorter")
        if not self._can_stop(slot, n):
            return self._done(slot, f"this model's memory cannot be cut from {len(self.states[slot])} to {n} tokens")
        del self.states[slot][n:]
        if not n:
            self.bare.discard(slot)
        return self._done(slot)

    async def capture(self, slot: int, start: int, end: int, spans: tuple[Span, ...]) -> Done:
        self._check_block(start, end, spans, self.info.stages)
        if end > len(self.states[slot]):
            return self._done(slot, f"holds {len(self.states[slot])}, not {end}")
        for stage, view in enumerate(self._payloads(spans, end - start)):
            view[:BASE_BYTES] = bytes([stage]) * BASE_BYTES
            view[BASE_BYTES:] = b"".join(self.states[slot][start:end])
        return self._done(slot)

    async def apply(
        self,
        slot: int,
        *,
        start: int,
        end: int,
        from_: int,
        upto: int,
        spans: tuple[Span, ...],
        tokens: Tokens,
        stages: tuple[StageShape, ...] = (),
    ) -> Done:
        stages = stages or self.info.stages
        if not is_split(stages, self.info.row_layers):
            return self._done(slot, "not a split of its layers")
        self._check_block(start, end, spans, stages)
        held = self.states[slot]
        if slot in self.running or len(held) != from_ or not start <= from_ < upto <= end or len(tokens) != end - start:
            return self._done(slot, f"busy, or holds {len(held)}, not {from_}")
        payloads = [bytes(view) for view in self._payloads(spans, end - start)]
        rows = payloads[0][BASE_BYTES:]
        if any(payload != bytes([i]) * BASE_BYTES + rows for i, payload in enumerate(payloads)):
            rows, self.wrong_restores = b"\0" * len(rows), self.wrong_restores + 1
        for position in range(from_, upto):
            at = STATE_BYTES * (position - start)
            state = rows[at : at + STATE_BYTES]
            right = next_state(held[-1] if held else b"", int(tokens[position - start]))
            self.wrong_restores += state != right
            held.append(state)
        if not self.info.cuttable:
            self.bare.add(slot)
        return self._done(slot)

    async def compact(self, slot: int, start: int, end: int) -> Done:
        self.compacted.append((slot, start, min(end, len(self.states[slot]))))
        return self._done(slot)

    # ------------------------------------------------------------------------------------------------------ checkpoints

    def hold_now(self, slot: int) -> Done:
        states = self.states[slot]
        if self.info.cuttable or not self._can_stop(slot, len(states)) or not states:
            return self._done(slot, "nothing that can be resumed")
        if len(self.held_checkpoints) >= self.info.spare_checkpoints:
            return self._done(slot, "no spare sequence: capture or release a checkpoint first")
        self._checkpoint_ids += 1
        self.held_checkpoints[self._checkpoint_ids] = FakeCheckpoint(len(states), states[-1])
        return msgspec.structs.replace(
            self._done(slot), checkpoint=self._checkpoint_ids, payload_bytes=self.info.checkpoint_bytes
        )

    async def hold(self, slot: int) -> Done:
        return self.hold_now(slot)

    async def capture_checkpoint(self, checkpoint: int, offset: int, span: Span) -> Done:
        held = self.held_checkpoints.get(checkpoint)
        if held is None:
            return Done(job=0, ok=False, held=0, reason=f"checkpoint {checkpoint} is not held")
        head = held.position.to_bytes(8, "little") + held.state
        payload = head.ljust(self.info.checkpoint_bytes, b"\0")
        n = self._checkpoint_block(offset, len(payload), span)
        view = self._arena.view(span)[PAGE : PAGE + pad_to_page(n)]
        view[:] = payload[offset : offset + n].ljust(pad_to_page(n), b"\0")
        return Done(job=0, ok=True, held=held.position)

    async def release_checkpoint(self, checkpoint: int) -> Done:
        held = self.held_checkpoints.pop(checkpoint, None)
        reason = "" if held else f"checkpoint {checkpoint} is not held"
        return Done(job=0, ok=held is not None, held=held.position if held else 0, reason=reason)

    async def apply_checkpoint(self, slot: int, *, position: int, offset: int, total: int, span: Span) -> Done:
        n = self._checkpoint_block(offset, total, span)
        if slot in self.running:
            return self._done(slot, f"slot {slot} has a running request")
        arrived = self._arriving.pop(slot, b"") if offset else b""
        if len(arrived) != offset:
            return self._done(slot, f"the block at {offset} does not follow the one before it")
        arrived += bytes(self._arena.view(span)[PAGE : PAGE + n])
        if len(arrived) < total:
            self._arriving[slot] = arrived
            return self._done(slot)
        if total != self.info.checkpoint_bytes or int.from_bytes(arrived[:8], "little") != position:
            return self._done(slot, f"the checkpoint at {position} is not usable")
        state, states = arrived[8:CHECKPOINT_HEAD_BYTES], self.states[slot]
        if self.info.stages and len(states) < position:
            return self._done(slot, f"slot {slot} holds the rows of {len(states)} tokens, not {position}")
        if self.info.stages:
            self.wrong_restores += states[position - 1] != state
        self.states[slot] = [*states[: position - 1], *[b""] * (position - 1 - len(states)), state]
        self.bare.discard(slot)
        return self._done(slot)

    def _checkpoint_block(self, offset: int, total: int, span: Span) -> int:
        if offset % BLOCK_BYTES or not 0 <= offset < total:
            raise EngineRefused(f"{offset} is not where a block of a checkpoint of {total} bytes begins")
        n = min(BLOCK_BYTES, total - offset)
        if span.length < PAGE + pad_to_page(n):
            raise EngineRefused(f"a span of {span.length} bytes is too small")
        return n

    # ----------------------------------------------------------------------------------------------------------- spans

    def _payloads(self, spans: Sequence[Span], n: int) -> list[memoryview]:
        size = BASE_BYTES + STATE_BYTES * n
        return [self._arena.view(span)[PAGE : PAGE + size] for span in spans]

    def _check_block(self, start: int, end: int, spans: Sequence[Span], stages: Sequence[StageShape]) -> None:
        if not 0 < end - start <= SEGMENT_TOKENS or len(spans) != len(stages):
            raise EngineRefused(f"bad block [{start}, {end}) in {len(spans)} spans")

    def _done(self, slot: int, reason: str = "") -> Done:
        return Done(job=0, ok=not reason, held=len(self.states[slot]), reason=reason)


class FakeRun:
    """Implements interface.Generation: Progress (and Held) to the prompt's end, then a token each time it is asked."""

    def __init__(self, engine: FakeEngine, command: Run) -> None:
        self._engine, self._command, self._born = engine, command, engine.generation
        self._tokens = unpack_tokens(command.tokens)
        self._text = TextStream(command.stop)
        self._prompt_tokens = len(self._tokens)
        self._written, self._last = 0, -1
        self._fresh: list[int] = []  # written, and not in `_tokens`
        self.pauses = self._stands_still = False
        self._outcome: Finished | None = None
        self._next: list[Held | Finished] = []
        self.checkpoints: list[Held] = []
        self._begin(command.keep)
        if not self._refusal:
            self._hold_if_asked()

    def _begin(self, keep: int) -> None:
        engine, slot = self._engine, self._command.slot
        ready = slot not in engine.running and len(engine.states[slot]) >= keep and engine._can_stop(slot, keep)
        self._refusal = "" if ready else "slot not ready"
        if ready:
            del engine.states[slot][keep:]
            engine.running[slot] = self

    def __aiter__(self) -> FakeRun:
        return self

    def resume(self, keep: int) -> None:
        self._stands_still = False
        if self._outcome is None and self._engine.generation == self._born:
            self._begin(keep)

    def _pause(self) -> Paused:
        self.pauses, self._stands_still = False, True
        self._engine.running.pop(self._command.slot, None)
        self._tokens = np.concatenate([self._tokens, self._fresh]).astype(np.int32)
        self._fresh = []
        held = len(self._engine.states[self._command.slot])
        return Paused(request=self._command.request, held=held)

    async def __anext__(self) -> Progress | Delta | Held | Paused | Finished:
        await asyncio.sleep(0)
        while self._stands_still and self._outcome is None and self._engine.generation == self._born:  # noqa: ASYNC110
            await asyncio.sleep(0)
        command, engine = self._command, self._engine
        if self._next:
            return self._next.pop(0)
        if self._outcome is not None:
            raise StopAsyncIteration
        if engine.generation != self._born:
            raise EngineGone("the engine process ended (signal 9); a new one is starting, send the request again")
        states = engine.states[command.slot]
        if self._refusal:
            raise RunError(self._refusal, held=len(states))
        if self.pauses:
            return self._pause()
        if len(states) < len(self._tokens):
            stop = min((at for at in command.checkpoints if at > len(states)), default=len(self._tokens))
            for token in self._tokens[len(states) : stop]:
                states.append(next_state(states[-1] if states else b"", int(token)))
            self._hold_if_asked()
            return Progress(request=command.request, held=len(states), total=len(self._tokens))
        return self._write(states)

    def _hold_if_asked(self) -> None:
        if len(self._engine.states[self._command.slot]) in self._command.checkpoints:
            self._hold()

    def _hold(self) -> None:
        if self._engine.info.cuttable:
            return
        done = self._engine.hold_now(self._command.slot)
        held = Held(
            request=self._command.request,
            position=done.held,
            checkpoint=done.checkpoint,
            payload_bytes=done.payload_bytes,
            reason=done.reason,
        )
        self._next.append(held)
        if held.checkpoint:
            self.checkpoints.append(held)

    def _write(self, states: list[bytes]) -> Delta | Held | Finished:
        command = self._command
        if self._text.stop_string is not None:
            return self._end("stop")
        if self._written >= min(command.max_tokens, command.limit - self._prompt_tokens):
            return self._end("length")
        if self._fresh:
            states.append(next_state(states[-1], self._last))
        if states[-1][0] % _END_ONE_IN == 0 and not command.ignore_eos:
            return self._end("stop")
        letter = ord("a") + states[-1][1] % 26
        self._last = letter + FIRST_BYTE
        self._fresh.append(self._last)
        self._written += 1
        text = self._text.feed(bytes([letter]))
        return Delta(request=command.request, tokens=pack_tokens([self._last]), text=text)

    def _end(self, reason: str) -> Held | Finished:
        self._next.append(self._finish(reason))
        return self._next.pop(0)

    def _finish(self, reason: str) -> Finished:
        command = self._command
        self._engine.running.pop(command.slot, None)
        if command.hold_end and self._engine.states[command.slot]:
            self._hold()
        held = len(self._engine.states[command.slot])
        read = len(self._tokens) - command.keep
        timing = Timing(
            read_s=read * self._engine.read_token_s, read_tokens=read, write_s=0.0, write_tokens=self._written
        )
        self._outcome = Finished(
            request=command.request,
            reason=reason,
            held=held,
            timing=timing,
            text=self._text.finish(),
            stop_string=self._text.stop_string,
        )
        return self._outcome

    async def cancel(self) -> Finished:
        await asyncio.sleep(0)
        if self._outcome is None and self._engine.generation != self._born:
            raise EngineGone("the engine process ended (signal 9); a new one is starting, send the request again")
        return self._outcome or self._finish("cancelled")
