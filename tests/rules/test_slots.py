"""The seat rule, row by row."""

from strata.rules.slots import Seat, SlotView, choose_seat


def slot(index, *, idle=True, held=0, shared=0, frontier=0, parked=True, last_used_s=0.0, forkable=None):
    return SlotView(
        index=index,
        idle=idle,
        held=held,
        shared=shared,
        frontier=frontier,
        parked=parked,
        last_used_s=last_used_s,
        forkable=shared if forkable is None else forkable,
    )


def seat(*slots):
    return choose_seat(slots, least_fork=32)


def test_what_cannot_be_forked_is_gone_back_to_in_place():
    assert seat(slot(0), slot(1, held=500, shared=460, frontier=450, forkable=0)) == Seat(slot=1, keep=460)
    assert seat(slot(0), slot(1, held=500, shared=300, frontier=450, forkable=0)) == Seat(slot=0, keep=0)


def test_nothing_idle_is_no_seat():
    assert seat(slot(0, idle=False)) is None


def test_continues_in_place_where_the_prompt_extends_what_is_held():
    assert seat(slot(0), slot(1, held=500, shared=500, frontier=450)) == Seat(slot=1, keep=500)


def test_a_rewritten_reply_still_continues_in_place():
    assert seat(slot(0), slot(1, held=500, shared=460, frontier=450)) == Seat(slot=1, keep=460)


def test_an_edit_before_the_frontier_forks_and_leaves_the_old_branch_live():
    assert seat(slot(0), slot(1, held=500, shared=300, frontier=450)) == Seat(slot=0, keep=300, fork_from=1)


def test_a_busy_slot_is_forked_from():
    assert seat(slot(0, idle=False, held=500, shared=400), slot(1)) == Seat(slot=1, keep=400, fork_from=0)


def test_a_short_shared_prefix_is_not_forked():
    assert seat(slot(0, idle=False, held=500, shared=31), slot(1)) == Seat(slot=1, keep=0)


def test_a_stranger_takes_the_empty_slot_then_the_oldest_parked_one():
    assert seat(slot(0, held=9, last_used_s=1), slot(1), slot(2, held=9)).slot == 1
    assert seat(slot(0, held=9, last_used_s=2), slot(1, held=9, last_used_s=1)).slot == 1
    assert seat(slot(0, held=9, last_used_s=1, parked=False), slot(1, held=9, last_used_s=2)).slot == 1


def test_a_short_one_goes_before_a_long_one_that_is_older():
    main, helper = slot(0, held=6000, last_used_s=1, parked=False), slot(1, held=90, last_used_s=50, parked=False)
    assert seat(main, helper).slot == 1
    assert seat(slot(0, held=6000, last_used_s=1), slot(1, held=90, last_used_s=50)).slot == 1
    assert seat(slot(0, held=20000, last_used_s=1), slot(1, held=90, last_used_s=50, parked=False)).slot == 1


def test_similar_ones_go_by_age():
    assert seat(slot(0, held=6000, last_used_s=1), slot(1, held=5900, last_used_s=50)).slot == 0


def test_what_is_parked_goes_first_unless_it_is_much_longer():
    assert seat(slot(0, held=1000, last_used_s=9), slot(1, held=500, last_used_s=1, parked=False)).slot == 0
    assert seat(slot(0, held=20000, last_used_s=9), slot(1, held=500, last_used_s=1, parked=False)).slot == 1


def test_a_long_one_that_is_idle_for_long_goes_in_the_end():
    views = (slot(1, held=90, last_used_s=6000, parked=False), slot(2, held=80, last_used_s=5000, parked=False))
    assert seat(slot(0, held=6000, last_used_s=5000, parked=False), *views).slot == 2
    assert seat(slot(0, held=6000, last_used_s=2000, parked=False), *views).slot == 0


def test_what_the_request_shares_is_not_lost():
    assert seat(slot(0, held=600, shared=30, last_used_s=9), slot(1, held=33, shared=31, forkable=0)).slot == 1


def test_the_source_of_a_fork_is_not_the_slot_that_gives_way():
    got = seat(slot(0, held=500, shared=300, frontier=450), slot(1, held=9, last_used_s=5, frontier=8))
    assert got == Seat(slot=1, keep=300, fork_from=0)


def test_alone_it_is_cut_back_in_place():
    assert seat(slot(0, held=500, shared=300, frontier=450)) == Seat(slot=0, keep=300)
