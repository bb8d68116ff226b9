"""One request's life, from the prompt to the parked conversation. START HERE.

`run_turn` names every step; the steps are the functions below it. It owns no state: slots belong to slots.py, what is
stored belongs to the cache, and the engine does the rest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec
import numpy as np

from strata.cache.checkpoints import Captured, CheckpointTaker
from strata.engine.interface import Engine, Generation
from strata.engine.protocol import Delta, Finished, Held, Paused, Progress, Run, pack_tokens, unpack_tokens
from strata.errors import BadRequest, ContextOverflow, EngineGone, RunError, StrataError
from strata.rules import prefix
from strata.rules.slots import Seat
from strata.serve.making_room import Standing, cut_to_claim, empty_idle, step_aside, wait_for_room
from strata.serve.parks import Workshop, leave, park
from strata.serve.pool import Claim
from strata.serve.request import (
    Admitted,
    CacheReport,
    Completed,
    Parked,
    Reading,
    Started,
    Text,
    TurnEvent,
    TurnRequest,
    Waiting,
)
from strata.serve.slots import NOTHING, Slot
from strata.serve.system_prompts import keep_system_prompt
from strata.types import Key, Tokens

log = logging.getLogger("strata.turn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt as tokens, and the root of its key chain, which tells whose conversation it is."""

    root: Key
    tokens: Tokens


async def run_turn(shop: Workshop, request: TurnRequest) -> AsyncGenerator[TurnEvent, None]:
    """The events of one request. A StrataError before the first event means that nothing was done.

    Closing the generator early (the client went away) cancels the request and leaves its slot right.
    """
    prompt = await prepare(shop.engine, request)
    check_fits(shop.engine, prompt)
    check_bias(shop.engine, request)
    yield Admitted(prompt_tokens=len(prompt.tokens))
    ticket = shop.slots.enter(prompt.root, prompt.tokens, reuse=request.cache_prompt)
    async with aclosing(shop.slots.wait(ticket)) as places:
        async for place in places:
            yield Waiting(position=place.position, total=place.total)
    slot, seat = shop.slots.seated(ticket)
    claim = shop.pool.claim(slot.index, len(prompt.tokens))
    run = Running(slot=slot, prompt=prompt, claim=claim, engine_generation=shop.engine.generation)
    try:
        if not shop.pool.enters(claim):
            yield Parked()
            seat = await wait_for_room(shop, slot, claim)
        report = await fill(shop, slot, seat, prompt, reuse=request.cache_prompt)
        run.check_engine(shop.engine)
        yield Started(slot=slot.index, cache=report)
        run.taker = shop.cache.taker if shop.cache is not None and request.cache_prompt else None
        run.generation = shop.engine.run(command(shop, run, request, keep=report.reused))
        async for event in run.generation:
            match event:
                case Progress():
                    yield run.read(event)
                case Delta():
                    yield run.wrote(event)
                case Held():
                    run.take(event)
                case Paused():
                    yield Parked()
                    standing = run.standing(event, shop.engine, keeps=request.cache_prompt)
                    run.generation.resume(await step_aside(shop, slot, claim, standing))
                case Finished():
                    run.finished = event
        yield Text(text=run.end().text, n_tokens=0)
    except RunError as error:
        run.failed_at = error.held
        raise
    finally:
        await asyncio.shield(settle(shop, run, request))
    yield completed(run, report)


@dataclass(slots=True, kw_only=True)
class Running:
    """What is known of a request while it runs."""

    slot: Slot
    prompt: Prompt
    claim: Claim
    engine_generation: int  # of the engine process that the slot was taken in
    generation: Generation | None = None
    generated: list[Tokens] = field(default_factory=list)
    finished: Finished | None = None
    failed_at: int | None = None  # positions held after an engine error
    taker: CheckpointTaker | None = None  # of memory that cannot be cut, if it is to be kept
    taking: dict[int, asyncio.Task[Captured | None]] = field(default_factory=dict)  # by checkpoint

    def read(self, event: Progress) -> Reading:
        self.slot.doing, self.slot.total = "reading" if event.held < event.total else "ready", event.total
        self.slot.tokens = self.held_tokens(event.held)
        return Reading(held=event.held, total=event.total)

    def wrote(self, event: Delta) -> Text:
        self.slot.doing, self.slot.tokens = "active", self.prompt.tokens
        self.generated.append(unpack_tokens(event.tokens))
        self.claim.wrote(len(self.generated[-1]))
        return Text(text=event.text, n_tokens=len(self.generated[-1]))

    def standing(self, event: Paused, engine: Engine, *, keeps: bool) -> Standing:
        return Standing(
            root=self.prompt.root,
            tokens=self.held_tokens(None),
            held=event.held,
            frontier=prefix.frontier(self.prompt.tokens, engine.info.openers),
            keeps=keeps,
        )

    def take(self, event: Held) -> None:
        """Capture a checkpoint beside the request."""
        if self.taker is None:
            return
        if not event.checkpoint:
            self.taker.given_up(event.position, event.reason)
            return
        tokens = self.held_tokens(event.position)
        assert len(tokens) == event.position, "the engine holds tokens that nobody heard of"
        work = self.taker.take(event.checkpoint, self.prompt.root, tokens, event.payload_bytes, self.engine_generation)
        self.taking[event.checkpoint] = asyncio.create_task(work)

    async def captured(self) -> tuple[Captured, ...]:
        """The checkpoints that were taken, once; they belong to the caller. The engine holds none of them any more."""
        if self.taker is None or self.generation is None:
            return ()
        outcomes = await asyncio.gather(*self.taking.values(), return_exceptions=True)
        for held in self.generation.checkpoints:
            if held.checkpoint and held.checkpoint not in self.taking:
                await self.taker.release(held.checkpoint, self.engine_generation)
        self.generation = None
        return tuple(outcome for outcome in outcomes if isinstance(outcome, Captured))

    def check_engine(self, engine: Engine) -> None:
        """Raises EngineGone when the engine is another one than when the slot was taken: it holds nothing of ours."""
        if engine.generation != self.engine_generation:
            raise EngineGone("the engine was replaced while the request was prepared; send it again", retry_after_s=1)

    def end(self) -> Finished:
        assert self.finished is not None, "the engine ended a request without Finished"
        return self.finished

    def held_tokens(self, held: int | None) -> Tokens:
        """The first `held` tokens of prompt and reply; None: all."""
        return np.concatenate([self.prompt.tokens, *self.generated])[:held]


# --------------------------------------------------------------------------------------------------------------- before


async def prepare(engine: Engine, request: TurnRequest) -> Prompt:
    """Render and tokenise; the engine's text thread does it, so other slots go on decoding."""
    messages = None if request.messages is None else msgspec.json.encode(request.messages)
    owner = request.namespace if request.cache_prompt else None
    prepared = await engine.prepare(messages_json=messages, text=request.text, owner=owner)
    root = prefix.root_key(engine.info.fingerprint, request.namespace)
    return Prompt(root=root, tokens=unpack_tokens(prepared.tokens))


def check_fits(engine: Engine, prompt: Prompt) -> None:
    """Raises BadRequest for an empty prompt, ContextOverflow for one that leaves no room for a reply."""
    n, context = len(prompt.tokens), engine.info.context
    if n == 0:
        raise BadRequest("the prompt is empty: it must have at least one token", field="prompt")
    if n >= context:
        is_whole_pool = context == engine.info.room_cells and engine.info.slots > 1
        holder, flag = ("K/V pool", "--pool-cells") if is_whole_pool else ("context", "--context")
        raise ContextOverflow(
            f"the prompt has {n} tokens, and the {holder} of {context} tokens must hold it and at least one more; "
            f"shorten it, or start the server with a larger {flag}",
            field="messages",
        )


def check_bias(engine: Engine, request: TurnRequest) -> None:
    """Raises BadRequest for a logit bias of a token that the model does not have."""
    n_tokens = engine.info.vocab_tokens
    unknown = [token for token in request.sampling.logit_bias if not 0 <= token < n_tokens]
    if unknown:
        raise BadRequest(
            f"logit_bias: token {unknown[0]} does not exist; this model has the ids 0 to {n_tokens - 1}",
            field="logit_bias",
        )


async def fill(shop: Workshop, slot: Slot, seat: Seat, prompt: Prompt, *, reuse: bool) -> CacheReport:
    """Bring in what need not be read again: the slot's own prefix or a fork, then what the cache has beyond that."""
    leave(shop, slot, stays=seat.keep if seat.fork_from is None else 0)
    goes_back = not shop.engine.info.cuttable and seat.keep < len(slot.tokens)
    slot.tokens = slot.tokens[: seat.keep] if seat.fork_from is None and not goes_back else NOTHING
    slot.root, slot.frontier, slot.owed = prompt.root, 0, False
    await slot.give_way(len(slot.tokens))
    held = await take_live(shop, slot, seat, prompt, goes_back=goes_back)
    await empty_idle(shop)
    slot.tokens = prompt.tokens[:held]
    sources = [] if not held else [slot.came_from if seat.fork_from is None else "fork"]
    slot.came_from = "live"
    restore_s: float | None = None
    if shop.cache is not None and reuse:
        found = shop.cache.lookup(prompt.root, prompt.tokens, beyond=held + 1, held=held)
        if found is not None:
            restored = await shop.cache.restore(slot.index, found, held)
            sources = (sources if restored.kept else []) + restored.sources
            held, restore_s = restored.held, restored.seconds
            slot.tokens = prompt.tokens[:held]
    return CacheReport(source="+".join(sources) or "none", reused=held, total=len(prompt.tokens), restore_s=restore_s)


async def take_live(shop: Workshop, slot: Slot, seat: Seat, prompt: Prompt, *, goes_back: bool) -> int:
    """Cut the slot back to what it keeps, or fork; the positions it holds then, 0 when the memory cannot do it.

    `goes_back`: to a stored checkpoint, for memory that cannot be cut.
    """
    keep = seat.keep
    if seat.fork_from is None and goes_back and keep and shop.cache is not None:
        return await shop.cache.go_back(slot.index, prompt.root, prompt.tokens[: keep + 1])
    if seat.fork_from is None:
        done = await shop.engine.trim(slot.index, keep)
    else:
        # While parks were given way, another request may have taken the source.
        source = shop.slots.all[seat.fork_from]
        view = source.view(prompt.root, prompt.tokens, kept=True, resume_point=shop.slots.resume_point)
        keep = min(keep, view.forkable)
        done = await shop.engine.fork(seat.fork_from, slot.index, keep)
    if done.ok and done.held == keep:
        return keep
    if seat.fork_from is not None:
        log.info("slot %d restores or reads what slot %d holds too: %s", slot.index, seat.fork_from, done.reason)
    await shop.engine.trim(slot.index, 0)
    return 0


def command(shop: Workshop, run: Running, request: TurnRequest, *, keep: int) -> Run:
    slot, prompt, context = run.slot, run.prompt, shop.engine.info.context
    cache = shop.cache if run.taker is not None else None
    return Run(
        request=0,
        slot=slot.index,
        keep=keep,
        tokens=pack_tokens(prompt.tokens),
        sampling=request.sampling,
        max_tokens=context if request.max_tokens is None else request.max_tokens,
        limit=context,
        stop=request.stop,
        ignore_eos=request.ignore_eos,
        checkpoints=() if cache is None else cache.checkpoints_to_take(prompt.root, prompt.tokens, keep),
        hold_end=cache is not None and cache.parks,
    )


# ---------------------------------------------------------------------------------------------------------------- after


async def settle(shop: Workshop, run: Running, request: TurnRequest) -> None:
    """Note what the slot holds now, park it, and give it back; also after a cancel or an error."""
    slot = run.slot
    captured: tuple[Captured, ...] = ()
    ran = run.generation is not None
    try:
        finished = await run_out(run)
        captured = await run.captured()
        if finished is not None and shop.cache is not None:
            shop.cache.ladder.costs.note_read(finished.timing.read_tokens, finished.timing.read_s)
        if finished is not None:
            slot.tokens = run.held_tokens(finished.held)
            slot.provisional = finished.reason == "cancelled"
        run.check_engine(shop.engine)
        if not ran:
            await cut_to_claim(shop, slot)
        openers = shop.engine.info.openers
        if slot.provisional and finished is not None:
            await revert(shop, run, openers, captured)
        slot.frontier = prefix.frontier(slot.tokens, openers) or 0
        slot.owed = finished is not None and (shop.engine.info.cuttable or not slot.provisional)
        kept = request.cache_prompt and finished is not None
        if kept and request.has_instructions and shop.cache is not None:
            await keep_system_prompt(shop.cache.system_prompts, slot, run.prompt.tokens, captured, shop.parks)
        if not request.cache_prompt:
            slot.forget()
        elif finished is not None and not slot.provisional:
            park(shop, slot, frontier=prefix.frontier(run.prompt.tokens, openers), checkpoints=captured)
            captured = ()
    except StrataError as error:
        log.info("slot %d: %s", slot.index, error.message)
        slot.forget()
    finally:
        try:
            for unused in (*captured, *await run.captured()):
                shop.give_back(unused)
        finally:
            shop.pool.leave(run.claim)
            shop.slots.give_back(slot)


async def revert(shop: Workshop, run: Running, openers: Collection[int], captured: Sequence[Captured]) -> None:
    """After a cancel: back to the last turn opener that was evaluated. Half a reply is nobody's history (SPEC §6).

    But what was read of a prompt stays: who asks again goes on there (docs/decisions/0016). Memory that cannot be cut
    goes back to the checkpoint that was taken there, or keeps what it holds.
    """
    slot = run.slot
    if not shop.engine.info.cuttable:
        in_memory = (taken for taken in captured if not taken.ticket)
        last = max(in_memory, key=lambda taken: taken.position, default=None)
        if last is not None and run.taker is not None:
            slot.tokens = slot.tokens[: await run.taker.put_back(slot.index, last)]
        return
    if len(slot.tokens) < len(run.prompt.tokens):
        return
    slot.tokens = slot.tokens[: len(run.prompt.tokens)]
    opener = prefix.frontier(slot.tokens, openers)
    if opener is None:
        return
    await slot.give_way(opener)
    done = await shop.engine.trim(slot.index, opener)
    if done.ok:
        slot.tokens = slot.tokens[:opener]


async def run_out(run: Running) -> Finished | None:
    """How the request ended; cancels it when it still runs. None when it never ran, or the engine failed."""
    if run.failed_at is not None:
        run.slot.tokens = run.held_tokens(run.failed_at)
        return None
    if run.finished is None and run.generation is not None:
        return await run.generation.cancel()
    return run.finished


def completed(run: Running, report: CacheReport) -> Completed:
    finished = run.end()
    return Completed(
        reason=finished.reason,
        prompt_tokens=len(run.prompt.tokens),
        cached_tokens=report.reused,
        completion_tokens=sum(map(len, run.generated)),
        cache=report,
        timing=finished.timing,
        stop_string=finished.stop_string,
    )
