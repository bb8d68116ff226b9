"""Who may run in a pool that is too small for all: everybody gets to the end, and the pool is never overdrawn."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.rules.pool import IdleSlot, Room, gives_up

ROOM = Room(cells=1000, limit=600)


def test_a_request_alone_always_starts() -> None:
    assert ROOM.may_start(599, [])


@pytest.mark.parametrize(
    ("tokens", "running", "may"),
    [
        (100, [100], True),
        (375, [375], True),  # 375 + 125 twice: exactly all
        (376, [375], False),
        (599, [1], True),  # no claim is more than one sequence can come to
        (599, [276], False),
        (10, [100, 100, 100], True),
        (300, [100, 100, 100], False),
    ],
)
def test_beside_others_it_starts_if_all_have_their_reserve(tokens: int, running: list[int], may: bool) -> None:
    assert ROOM.may_start(tokens, running) is may


def test_a_pool_for_every_slot_never_makes_anybody_wait() -> None:
    room = Room(cells=4 * 600, limit=600)
    assert room.may_start(600, [600, 599, 600])
    assert room.excess([600, 600, 600], 600) == 0


@pytest.mark.parametrize(
    ("running", "others", "cells"), [([100], 0, 0), ([100], 775, 0), ([100], 776, 1), ([], 1001, 1)]
)
def test_what_idle_slots_must_give_up(running: list[int], others: int, cells: int) -> None:
    assert ROOM.excess(running, others) == cells


def idle(index: int, held: int, *, kept: bool = True, used: float = 0.0) -> IdleSlot:
    return IdleSlot(index=index, held=held, kept=kept, last_used_s=used)


def test_what_is_kept_elsewhere_goes_first_then_the_longest_unused() -> None:
    slots = [idle(0, 100, kept=False), idle(1, 100, used=9), idle(2, 100, used=3), idle(3, 0)]
    assert gives_up(slots, 0) == ()
    assert gives_up(slots, 1) == (2,)
    assert gives_up(slots, 101) == (2, 1)
    assert gives_up(slots, 5000) == (2, 1, 0)


# -------------------------------------------------------------------------------------------- a pool, played to the end


@dataclass(eq=False)
class Player:
    age: int
    prompt: int
    reply: int
    written: int = 0
    pauses: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt + self.written


@dataclass
class Play:
    """What the front and the engine do by these rules, a token for everybody in each step. `held` by idle slots."""

    room: Room
    running: list[Player] = field(default_factory=list)
    waiting: list[Player] = field(default_factory=list)
    idle: list[int] = field(default_factory=list)

    @property
    def used(self) -> int:
        return sum(player.tokens for player in self.running) + sum(self.idle)

    def admit(self) -> None:
        self.waiting.sort(key=lambda player: player.age)
        while self.waiting and self.room.may_start(self.waiting[0].tokens, [p.tokens for p in self.running]):
            self.running.append(self.waiting.pop(0))
        self.free(self.room.excess([p.tokens for p in self.running], sum(self.idle)))

    def free(self, excess: int) -> int:
        chosen = gives_up([idle(i, held) for i, held in enumerate(self.idle)], excess)
        freed = sum(self.idle[i] for i in chosen)
        for i in chosen:
            self.idle[i] = 0
        return freed

    def step(self) -> None:
        """One token each; while they do not fit, idle slots give way, then the youngest."""
        while self.used + len(self.running) > self.room.cells:
            if not self.free(1):
                youngest = max(self.running, key=lambda player: player.age)
                assert len(self.running) > 1, "alone and without room"
                self.running.remove(youngest)
                self.waiting.append(youngest)
                youngest.pauses += 1
        for player in [*self.running]:
            player.written += 1
            if player.written == player.reply:
                self.running.remove(player)
                self.idle.append(player.tokens)
        assert self.used <= self.room.cells


@given(st.data(), st.integers(40, 2000))
def test_everybody_gets_to_the_end(data: st.DataObject, cells: int) -> None:
    limit = data.draw(st.integers(16, cells))
    room = Room(cells=cells, limit=limit)
    lengths = data.draw(st.lists(st.tuples(st.integers(1, limit - 1), st.integers(1, limit)), min_size=1, max_size=8))
    players = [
        Player(age=age, prompt=prompt, reply=min(reply, limit - prompt)) for age, (prompt, reply) in enumerate(lengths)
    ]
    arrivals = data.draw(st.lists(st.integers(0, 3 * limit), min_size=len(players), max_size=len(players)))
    play, steps = Play(room), 0
    while any(player.written < player.reply for player in players):
        play.waiting += [player for player, at in zip(players, arrivals, strict=True) if at == steps]
        play.admit()
        assert play.running or not play.waiting, "somebody waits though nobody runs"
        play.step()
        steps += 1
        assert steps <= 3 * limit + sum(player.reply for player in players) + 1, "more steps than one after the other"
    assert players[0].pauses == 0 or min(arrivals) < arrivals[0]


@given(st.lists(st.integers(1, 500), max_size=6), st.integers(0, 500))
def test_who_was_let_in_leaves_every_other_its_reserve(running: list[int], tokens: int) -> None:
    room = Room(cells=1500, limit=500)
    if running and room.may_start(tokens, running):
        grown = [min(n + room.reserve, room.limit) for n in [*running, tokens]]
        assert sum(grown) <= room.cells
