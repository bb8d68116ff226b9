"""The engine process on the real SmolLM2, through the client: generation, blocks, forks, cancellation, concurrency."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

import numpy as np
import pytest
from tests.engine.rig import GREEDY, Rig, collect

from strata.engine.protocol import Delta, Finished, Progress, Run, Sampling, pack_tokens
from strata.errors import BadRequest, EngineRefused, RunError
from strata.types import Span, Tokens

STORY = "Write a long story about a fox who learns to read. " * 26
QUESTION = "What is 2 + 2? Answer with one short sentence."


def joined(tokens: Tokens, more: list[int]) -> Tokens:
    return np.concatenate([tokens, np.array(more, np.int32)])


# ------------------------------------------------------------------------------------------------------------ the model


def test_what_it_says_of_itself(rig: Rig) -> None:
    info = rig.info
    assert info.mode == "segments" and info.openers == (1,) and info.has_chat_template
    assert (info.slots, info.context, info.block_tokens, info.head_room) == (3, 1024, 256, 4096)
    assert info.pool_cells >= 3 * 1024 + 256
    (stage,) = info.stages
    assert (stage.layer_first, stage.layer_end, stage.token_bytes) == (0, 30, 23040)
    assert info.flash_attention and info.flash_attention_reason == "set by flag"
    assert len(info.fingerprint) == 32
    assert {event.stage for event in rig.loading} >= {"model", "context", "self-test"}
    assert max(event.fraction for event in rig.loading) > 0.9


# -------------------------------------------------------------------------------------------------------------- prompts


def test_a_chat_is_rendered_and_tokenised(rig: Rig) -> None:
    tokens = rig.chat("Hello there")
    text = rig.do(rig.client.detokenize(tokens))
    assert text.endswith("<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n")
    assert tokens[0] == 1 and list(tokens).count(1) == 3
    assert list(tokens) == list(rig.tokens(text))


def test_text_with_every_kind_of_character(rig: Rig) -> None:
    text = "Grüße 👨‍👩‍👧‍👦 漢字 \x00 end"
    assert rig.do(rig.client.detokenize(rig.tokens(text))) == text


@pytest.mark.parametrize("messages", [b"{", b'{"a": 1}', b"[1, 2]", b'[{"content": "no role"}]', b'[{"role": "user"}]'])
def test_messages_that_cannot_be_rendered(rig: Rig, messages: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        rig.do(rig.client.prepare(messages_json=messages))
    assert caught.value.status == 400 and caught.value.field == "messages"


def test_detokenizing_ids_that_do_not_exist(rig: Rig) -> None:
    with pytest.raises(EngineRefused):
        rig.do(rig.client.detokenize(np.array([5, 10**6], np.int32)))


# ----------------------------------------------------------------------------------------------------------- generation


def test_the_cost_of_its_steps_is_told_when_a_request_ends(rig: Rig) -> None:
    before = rig.client.steps
    rig.generate(rig.chat(QUESTION), max_tokens=20, ignore_eos=True)
    after = rig.client.steps
    # the first token came from the turn of the loop that took the command, which is not counted
    assert after.count - before.count == 19
    assert after.rows - before.rows == 19
    assert 0 < after.outside_s - before.outside_s < after.inside_s - before.inside_s


def test_the_greedy_choice_is_llama_cpps(rig: Rig) -> None:
    tokens = rig.chat(QUESTION)
    biased = Sampling(temperature=0, logit_bias={0: 0.0})  # changes nothing, but goes through a chain of samplers
    ours, theirs = (rig.generate(tokens, max_tokens=30, sampling=sampling) for sampling in (GREEDY, biased))
    assert ours.tokens == theirs.tokens


def test_a_reply(rig: Rig) -> None:
    tokens = rig.chat(QUESTION)
    reply = rig.generate(tokens, max_tokens=60)
    assert "4" in reply.text
    assert reply.finished.reason == "stop" and reply.finished.stop_string is None
    assert reply.finished.held == len(tokens) + len(reply.tokens)
    assert reply.text == rig.do(rig.client.detokenize(np.array(reply.tokens, np.int32)))
    timing = reply.finished.timing
    assert (timing.read_tokens, timing.write_tokens) == (len(tokens), len(reply.tokens))
    assert timing.read_s > 0 and timing.write_s > 0


def test_max_tokens(rig: Rig) -> None:
    tokens = rig.chat("Count to one hundred.")
    reply = rig.generate(tokens, max_tokens=5)
    assert reply.finished.reason == "length" and len(reply.tokens) == 5
    assert reply.finished.held == len(tokens) + 4  # the last token was sampled, not decoded


def test_no_tokens_at_all(rig: Rig) -> None:
    tokens = rig.chat("Hello")
    reply = rig.generate(tokens, max_tokens=0)
    assert (reply.finished.reason, reply.tokens, reply.finished.held) == ("length", [], len(tokens))
    longer = rig.generate(joined(tokens, [30, 40]), keep=len(tokens), max_tokens=0)
    assert longer.finished.timing.read_tokens == 2


def test_the_limit_ends_a_reply(rig: Rig) -> None:
    tokens = rig.chat("Count to one hundred.")
    reply = rig.generate(tokens, max_tokens=100, limit=len(tokens) + 3, ignore_eos=True)
    assert reply.finished.reason == "length" and len(reply.tokens) == 3


def test_ignore_eos_writes_on(rig: Rig) -> None:
    tokens = rig.chat(QUESTION)
    ended = len(rig.generate(tokens, max_tokens=60).tokens)
    assert len(rig.generate(tokens, max_tokens=ended + 3, ignore_eos=True).tokens) == ended + 3


def test_a_stop_string(rig: Rig) -> None:
    tokens = rig.chat(QUESTION)
    whole = rig.generate(tokens, max_tokens=60).text
    stop = whole[9:13]  # wherever the tokens begin and end
    reply = rig.generate(tokens, max_tokens=60, stop=(stop, "never there"))
    assert reply.finished.reason == "stop" and reply.finished.stop_string == stop
    assert reply.text == whole[: whole.index(stop)]
    assert reply.finished.held == len(tokens) + len(reply.tokens) - 1


def test_progress_counts_the_chunks(rig: Rig) -> None:
    tokens = rig.tokens(STORY)[:280]
    reply = rig.generate(tokens, max_tokens=1)
    held = [event.held for event in reply.progress]
    assert held == sorted(set(held)) and held[-1] == 280, "ever further, to the end"
    assert len(held) > 1 and max(b - a for a, b in pairwise([0, *held])) <= 256, "in chunks"
    assert {event.total for event in reply.progress} == {280}


def test_the_prefix_is_kept(rig: Rig) -> None:
    tokens = rig.chat("Name three colours.")
    first = rig.generate(tokens, max_tokens=12)
    again = rig.generate(tokens, keep=len(tokens) - 1, max_tokens=12)
    assert again.tokens == first.tokens
    assert again.finished.timing.read_tokens == 1


def test_a_seed_repeats_and_another_does_not(rig: Rig) -> None:
    tokens = rig.chat("Tell me something surprising.")

    def drawn(seed: int | None) -> list[int]:
        options = Sampling(temperature=1.5, top_p=1, top_k=0, min_p=0, seed=seed)
        return rig.generate(tokens, sampling=options, max_tokens=12, ignore_eos=True).tokens

    assert drawn(7) == drawn(7) != drawn(8)
    assert drawn(None) != drawn(None)
    assert drawn(-1) == drawn(-1)


def test_samplers_change_the_choice(rig: Rig) -> None:
    tokens = rig.chat(QUESTION)
    first = rig.generate(tokens, max_tokens=1).tokens[0]

    def choice(**options: object) -> int:
        return rig.generate(tokens, max_tokens=1, sampling=Sampling(**options)).tokens[0]

    assert choice(temperature=0, logit_bias={first: -100.0}) != first
    assert choice(temperature=0, logit_bias={300: 100.0, 10**7: 5.0}) == 300
    assert choice(temperature=2, top_k=1) == choice(temperature=2, top_p=0.0) == choice(temperature=2, min_p=1) == first
    plain = rig.generate(tokens, max_tokens=24, ignore_eos=True).tokens
    penalised = Sampling(temperature=0, repeat_penalty=1.8, frequency_penalty=1, presence_penalty=1)
    varied = rig.generate(tokens, max_tokens=24, ignore_eos=True, sampling=penalised).tokens
    assert len(set(varied)) > len(set(plain))


# --------------------------------------------------------------------------------------------------------------- blocks


def test_bytes_and_reply_survive_the_process(rig: Rig) -> None:
    """Park, kill -9, restore in the new process: equal bytes, and the 64 greedy tokens of a twin never parked."""
    tokens = rig.tokens(STORY)[:290]
    written = rig.generate(tokens, max_tokens=20, ignore_eos=True)
    held = written.finished.held
    history = joined(tokens, written.tokens)
    blocks = rig.park(0, held)
    parked = rig.payloads(blocks)
    twin = rig.generate(history, keep=held, max_tokens=64, ignore_eos=True)
    generation = rig.client.generation

    rig.kill()
    rig.do(rig.client.wait_ready())
    assert rig.client.generation == generation + 1 and rig.restarts
    rig.restore(0, blocks, history)
    assert rig.payloads(rig.park(0, held)) == parked
    resumed = rig.generate(history, keep=held, max_tokens=64, ignore_eos=True)
    assert resumed.tokens == twin.tokens
    assert resumed.finished.timing.read_tokens == 1


def test_a_restored_part_is_continued_by_reading(rig: Rig) -> None:
    tokens = rig.tokens(STORY)[:300]
    rig.generate(tokens, max_tokens=0)
    whole = rig.capture(0, 0, 100)
    block = rig.capture(0, 0, 256)
    done = rig.do(rig.apply(1, block, tokens, upto=100))
    assert done.ok and done.held == 100
    assert rig.payload(rig.capture(1, 0, 100)) == rig.payload(whole)
    done = rig.do(rig.apply(1, block, tokens, from_=100, upto=256))
    assert done.ok and done.held == 256
    assert rig.payload(rig.capture(1, 0, 256)) == rig.payload(block)
    assert rig.generate(tokens, slot=1, keep=256, max_tokens=0).finished.held == 300


def test_a_fork_shares_and_then_goes_its_own_way(rig: Rig) -> None:
    tokens = rig.tokens(STORY)[:200]
    rig.generate(tokens, max_tokens=0)
    before = rig.payload(rig.capture(0, 0, 200))
    done = rig.do(rig.client.fork(0, 1, 150))
    assert done.ok and done.held == 150
    rig.generate(joined(tokens[:150], [100, 200, 300]), slot=1, keep=150, max_tokens=4)
    assert rig.payload(rig.capture(0, 0, 200)) == before
    rig.do(rig.client.trim(0, 0))
    assert rig.payload(rig.capture(1, 0, 150))[: 4096 * 10] != b"\0" * 40960


def test_a_running_slot_can_be_captured_and_forked_but_not_changed(rig: Rig) -> None:
    tokens = rig.tokens(STORY)[:200]
    spare = rig.alloc(200)

    async def scene() -> None:
        running = rig.run(tokens, max_tokens=200, ignore_eos=True)
        async for event in running:
            if isinstance(event, Delta):
                break
        forked = await rig.client.fork(0, 1, 100)
        captured = await rig.client.capture(0, 0, 200, spare)
        trimmed = await rig.client.trim(0, 10)
        overwritten = await rig.client.fork(1, 0, 50)
        applied = await rig.client.apply(0, start=0, end=200, from_=0, upto=200, spans=spare, tokens=tokens)
        beyond = await rig.client.capture(0, 150, 400, rig.alloc(250))
        assert forked.ok and captured.ok
        for done in (trimmed, overwritten, applied):
            assert not done.ok and done.reason == "slot 0 has a running request" and done.held > 200
        assert not beyond.ok
        with pytest.raises(RunError, match="slot 0 has a running request"):
            await collect(rig.run(tokens))
        finished = await running.cancel()
        assert finished.reason == "cancelled" and finished.held >= 200

    rig.do(scene())


def test_blocks_that_make_no_sense(rig: Rig) -> None:
    tokens = rig.tokens(STORY)[:50]
    rig.generate(tokens, max_tokens=0)
    spans = rig.alloc(50)
    small, outside = (Span(spans[0].chunk, spans[0].offset, 4096),), (Span(0, 1 << 40, spans[0].length),)
    crooked = (Span(spans[0].chunk, spans[0].offset + 8, spans[0].length - 8),)
    for slot, start, end, where in [
        (0, 0, 50, ()),
        (0, 0, 50, small),
        (0, 0, 50, outside),
        (0, 0, 50, crooked),
        (0, 0, 50, spans * 2),
        (0, 0, 50, (Span(99, 0, 4096),)),
        (7, 0, 50, spans),
        (0, 0, 300, spans),
        (0, 20, 20, spans),
    ]:
        with pytest.raises(EngineRefused):
            rig.do(rig.client.capture(slot, start, end, where))
    assert rig.do(rig.client.capture(0, 0, 50, spans)).ok


# ------------------------------------------------------------------------------------------------------- runs that fail


def test_runs_that_cannot_start(rig: Rig) -> None:
    tokens = rig.tokens(STORY)[:60]
    rig.generate(tokens, max_tokens=0)

    def error(**options: object) -> RunError:
        with pytest.raises(RunError) as caught:
            rig.generate(**{"tokens": tokens, **options})
        return caught.value

    assert "holds 60 tokens, not 61" in str(error(tokens=joined(tokens, [5, 6]), keep=61))
    assert error(keep=60).held == 60
    assert "does not exist" in str(error(slot=3))
    assert "token ids" in str(error(tokens=joined(tokens, [-1])))
    assert "token ids" in str(error(tokens=joined(tokens, [10**6])))
    assert "exceed the limit" in str(error(limit=59))
    assert "keep 0" in str(error(tokens=[]))
    assert rig.generate(tokens, keep=30, max_tokens=1).finished.timing.read_tokens == 30


# ---------------------------------------------------------------------------------------------- cancelling, concurrency


def test_cancelling_takes_effect_within_one_chunk(rig: Rig) -> None:
    tokens = np.tile(rig.tokens(STORY), 4)[:1000]

    async def scene() -> tuple[Finished, float]:
        running = rig.run(tokens)
        first = await anext(aiter(running))
        assert isinstance(first, Progress) and 0 < first.held <= 256
        began = time.perf_counter()
        return await running.cancel(), time.perf_counter() - began

    finished, seconds = rig.do(scene())
    assert finished.reason == "cancelled"
    assert 0 < finished.held <= 512 and finished.timing.read_tokens == finished.held
    assert rig.do(rig.client.trim(0, 0)).ok
    assert seconds < 30


def test_cancelling_twice_and_after_the_end(rig: Rig) -> None:
    async def scene() -> None:
        running = rig.run(rig_tokens, max_tokens=500, ignore_eos=True)
        assert isinstance(await anext(aiter(running)), Progress)
        first = await running.cancel()
        assert first.reason == "cancelled" and await running.cancel() is first
        ended = rig.run(rig_tokens, keep=first.held - 1 if first.held < len(rig_tokens) else 0, max_tokens=1)
        events = [event async for event in ended]
        assert await ended.cancel() is events[-1]

    rig_tokens = rig.chat("Hello")
    rig.do(scene())


def test_concurrent_requests_keep_to_their_own_conversations(rig: Rig) -> None:
    """Three slots at once, twice. (Which prompts share a batch depends on their arrival, and rounding on that.)"""
    prompts = [rig.chat(text) for text in ("Name a colour.", "Count to ten.", "Who wrote Hamlet?")]

    async def together() -> list[object]:
        runs = [rig.run(prompt, slot=i, max_tokens=20) for i, prompt in enumerate(prompts)]
        return list(await asyncio.gather(*map(collect, runs)))

    for _ in range(2):
        replies = rig.do(together())
        for reply, prompt, word in zip(replies, prompts, ("", "", "Shakespeare"), strict=True):
            assert word in reply.text and reply.finished.reason in ("stop", "length")
            assert len(prompt) <= reply.finished.held <= len(prompt) + len(reply.tokens)
        for slot in range(3):
            rig.do(rig.client.trim(slot, 0))


def test_captures_do_not_disturb_who_writes(rig: Rig) -> None:
    """A block per step from another slot, and from the writing one: the same tokens as alone."""
    tokens, other = rig.tokens(STORY)[:250], rig.chat("Count to fifty.")
    rig.generate(tokens, slot=1, max_tokens=0)
    alone = rig.generate(other, max_tokens=30, ignore_eos=True).tokens
    rig.do(rig.client.trim(0, 0))
    spans = rig.alloc(250)

    async def scene() -> list[int]:
        writing = asyncio.ensure_future(collect(rig.run(other, max_tokens=30, ignore_eos=True)))
        captured = 0
        while not writing.done():
            assert (await rig.client.capture(1, 0, 250, spans)).ok
            await rig.client.capture(0, 0, 10, spans)  # refused while nothing of it is read yet
            captured += 1
        assert captured >= 3
        return (await writing).tokens

    assert rig.do(scene()) == alone


def test_parking_and_restoring_beside_who_writes(rig: Rig) -> None:
    """While one slot writes, another is captured, cleared, applied and captured again: equal bytes."""
    tokens, other = rig.tokens(STORY)[:250], rig.chat("Count to fifty.")
    rig.generate(tokens, slot=1, max_tokens=0)
    ranges = [(at, min(at + 64, 250)) for at in range(0, 250, 64)]
    first, second = ([rig.alloc(64) for _ in ranges] for _ in range(2))

    async def scene() -> None:
        writing = rig.run(other, max_tokens=400, ignore_eos=True)
        await anext(aiter(writing))
        for (start, end), spans in zip(ranges, first, strict=True):
            assert (await rig.client.capture(1, start, end, spans)).ok
        assert (await rig.client.trim(1, 0)).ok
        for (start, end), spans in zip(ranges, first, strict=True):
            part = tokens[start:end]
            done = await rig.client.apply(1, start=start, end=end, from_=start, upto=end, spans=spans, tokens=part)
            assert done.ok and done.held == end
        for (start, end), spans in zip(ranges, second, strict=True):
            assert (await rig.client.capture(1, start, end, spans)).ok
        assert (await writing.cancel()).reason == "cancelled"

    rig.do(scene())
    for (before,), (after,) in zip(first, second, strict=True):
        room = rig.info.head_room
        assert bytes(rig.arena.view(before)[room:]) == bytes(rig.arena.view(after)[room:])


def test_commands_of_one_slot_keep_their_order(rig: Rig) -> None:
    """A run sent behind a fork and a block of its slot waits for them."""
    tokens = rig.tokens(STORY)[:120]
    rig.generate(tokens, slot=2, max_tokens=0)
    block = rig.capture(2, 0, 120)

    async def scene() -> None:
        jobs = [
            asyncio.ensure_future(rig.client.fork(2, 0, 60)),
            asyncio.ensure_future(rig.client.trim(0, 0)),
            asyncio.ensure_future(rig.apply(0, block, tokens)),
            asyncio.ensure_future(rig.client.trim(0, 100)),
        ]
        await asyncio.sleep(0)  # all of them are sent
        reply = await collect(rig.run(tokens, keep=100, max_tokens=2))
        assert [done.ok for done in await asyncio.gather(*jobs)] == [True] * 4
        assert reply.finished.timing.read_tokens == 20

    rig.do(scene())


def test_a_wait_for_a_block_that_is_cancelled_lasts_until_the_engine_is_done(rig: Rig) -> None:
    """The spans may be freed when the call has returned, however it did."""
    tokens = rig.tokens(STORY)[:250]
    rig.generate(tokens, max_tokens=0)
    spans = rig.alloc(250)

    async def scene() -> None:
        reading = rig.run(tokens, slot=1, max_tokens=0)  # keeps the engine busy for a step
        capture = asyncio.ensure_future(rig.client.capture(0, 0, 250, spans))
        await asyncio.sleep(0)
        capture.cancel()
        with pytest.raises(asyncio.CancelledError):
            await capture
        assert bytes(rig.arena.view(spans[0])[4096:8192]) != b"\xa5" * 4096
        await collect(reading)

    rig.do(scene())


def test_the_request_number_is_assigned_by_the_client(rig: Rig) -> None:
    command = Run(
        request=99, slot=0, keep=0, tokens=pack_tokens(rig.chat("Hi")), sampling=GREEDY, max_tokens=1, limit=500
    )

    async def scene() -> set[int]:
        return {event.request async for event in rig.client.run(command)}

    numbers = rig.do(scene())
    assert len(numbers) == 1 and numbers != {99}
