"""How requests end: by a token, by length, by deadline, from outside."""

import pytest
from scripted import bare, make, request, take

from jaxserve.scheduler import Status


def run_to_first_token(scheduler, new, *token_ids):
    scheduler.add(new)
    return take(scheduler, scheduler.schedule(0.0), list(token_ids))[0]


def test_eos_ends_without_stop_reason_even_if_it_is_a_stop_id():
    new = request([2], eos_token_ids=frozenset([7]), stop_token_ids=frozenset([7, 8]))
    update = run_to_first_token(bare(), new, 7)
    assert update[1:4] == ([7], "stop", None)


def test_stop_id_is_reported():
    new = request([2], eos_token_ids=frozenset([7]), stop_token_ids=frozenset([7, 8]), max_tokens=1)
    assert run_to_first_token(bare(), new, 8)[1:4] == ([8], "stop", 8)  # and goes before length


def test_min_tokens_delays_eos_but_not_length():
    scheduler = bare()
    new = request([2], eos_token_ids=frozenset([7]), min_tokens=3, max_tokens=3)
    assert run_to_first_token(scheduler, new, 7).finish_reason is None
    assert take(scheduler, scheduler.schedule(0.0), [7])[0].finish_reason is None
    assert take(scheduler, scheduler.schedule(0.0), [7])[0].finish_reason == "stop"
    new = request([2], eos_token_ids=frozenset([7]), min_tokens=3, max_tokens=1)
    assert run_to_first_token(scheduler, new, 7).finish_reason == "length"


def test_commit_takes_no_token_or_many():
    scheduler = bare()
    new = request([2, 3], max_tokens=4, eos_token_ids=frozenset([7]))
    assert run_to_first_token(scheduler, new, 5).new_token_ids == [5]
    assert take(scheduler, scheduler.schedule(0.0), [])[0].new_token_ids == []
    assert (new.num_tokens, new.num_computed_tokens, new.num_in_flight) == (3, 2, 0)  # the same row again
    assert take(scheduler, scheduler.schedule(0.0), [5, 6])[0].new_token_ids == [5, 6]
    assert (new.num_tokens, new.num_computed_tokens) == (5, 4)
    assert take(scheduler, scheduler.schedule(0.0), [7, 8, 9])[0][1:4] == ([7], "stop", None)
    assert new.output_token_ids == [5, 5, 6, 7]
    assert scheduler.pool.num_held == 0


def test_overrun_of_a_stopped_row_is_dropped_and_its_pages_wait_for_it():
    scheduler = bare()
    new = request([2], eos_token_ids=frozenset([7]), max_tokens=9)
    scheduler.add(new)
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert [row.request for row in second.decode] == [new]
    assert take(scheduler, first, [7])[0].finish_reason == "stop"
    assert scheduler.pool.num_held == 1
    assert scheduler.schedule(0.0) is None
    assert take(scheduler, second, [9]) == []
    assert new.output_token_ids == [7]
    assert scheduler.pool.num_held == 0
    assert sorted(scheduler.running.free_slots) == [0, 1, 2, 3]  # released once


def test_logprobs_pass_through():
    scheduler = bare(max_num_batched_tokens=4)
    scheduler.add(request([2] * 6))
    assert take(scheduler, scheduler.schedule(0.0), [], logprobs=["x"]) == []  # a chunk that samples nothing
    last = take(scheduler, scheduler.schedule(0.0), [5], logprobs=["token"])
    assert [update[1:] for update in last] == [([5], None, None, "token")]
    assert take(scheduler, scheduler.schedule(0.0), [5], logprobs=["next"])[0].logprobs == "next"


def test_deadline_ends_running_and_waiting_requests_with_the_next_commit():
    sim = make(max_num_seqs=1)
    running, waiting, other = (request([2] * 3, max_tokens=9, deadline=deadline) for deadline in (5.0, 5.0, None))
    sim.add_all(running, waiting, other)
    sim.step()
    sim.now = 5.0
    assert [update.finish_reason for update in sim.step()] == [None]  # not later than the deadline yet
    sim.now = 5.1
    updates = {update.request: update[2:4] for update in sim.step() if update.finish_reason}
    assert updates == {running: ("abort", "deadline"), waiting: ("abort", "deadline")}
    sim.drain()
    assert len(other.output_token_ids) == 9


def test_deadline_of_a_lone_waiting_request_is_reported_without_a_commit():
    scheduler = bare()
    late = request([2] * 3, deadline=1.0)
    scheduler.add(late)
    assert scheduler.schedule(2.0) is None
    assert scheduler.has_unfinished()
    assert [update[:4] for update in scheduler.expired()] == [(late, [], "abort", "deadline")]
    assert not scheduler.has_unfinished()


def test_late_stop_string_drops_what_is_in_flight():
    sim = make()
    a = request([2] * 3, max_tokens=9)
    sim.add(a)
    sim.run(3)
    num_outputs = len(a.output_token_ids)
    sim.finish(a, "stop", "###")
    sim.drain()
    assert (a.finish_reason, a.stop_reason, len(a.output_token_ids)) == ("stop", "###", num_outputs)


def test_finishing_twice_changes_nothing():
    sim = make()
    a = request([2] * 3)
    sim.add(a)
    sim.drain()
    sim.scheduler.finish(a, "abort")
    assert a.finish_reason == "length"


def test_slot_is_reused_while_its_last_owner_is_in_flight():
    sim = make(max_num_seqs=1)
    a, b = request([2] * 3, max_tokens=9), request([3] * 3, max_tokens=3)
    sim.add_all(a, b)
    sim.dispatch()
    slot = a.slot
    sim.finish(a, "abort")
    plan = sim.dispatch()
    assert (plan.new_slots, b.slot) == ([b], slot)
    sim.drain()


@pytest.mark.parametrize("num_steps", range(7))
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("between", [False, True])
def test_abort_in_any_state_gives_everything_back(num_steps, overlap, between):
    sim = make(max_num_batched_tokens=8, overlap=overlap)
    victim, other = request([2] * 18, max_tokens=5), request([3] * 18, max_tokens=5)
    sim.add_all(victim, other)
    sim.run(num_steps)
    if between:
        sim.dispatch()
    if victim.status is not Status.FINISHED:
        sim.finish(victim, "abort")
    sim.drain()
    assert other.finish_reason == "length"


def test_pages_of_an_aborted_chunk_in_flight_never_enter_the_cache():
    sim = make()
    prompt = list(range(2, 15))
    a = request(prompt)
    sim.add(a)
    sim.dispatch()
    sim.finish(a, "abort")
    sim.commit()
    assert (sim.pool.num_held, sim.pool.num_cached) == (0, 0)
    sim.drain()
