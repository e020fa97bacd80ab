"""What one step holds, how requests end, and what is refused."""

import subprocess
import sys

import pytest
from scripted import make, request
from simulation import EOS, sample

from jaxserve.scheduler import PagePool, PoolTooSmall, QueueFull, Scheduler, SchedulerConfig, Status, StepResult


def bare(**config) -> Scheduler:
    """A scheduler whose tokens the test chooses itself."""
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64} | config
    return Scheduler(SchedulerConfig(**sizes), PagePool(32, 4))


def take(scheduler, plan, *token_ids, **more):
    return scheduler.commit(plan, StepResult(token_ids=list(token_ids), **more), 0.0)


def prefill(plan):
    return {row.request: len(row.token_ids) for row in plan.prefill}


# What a step holds


def test_decodes_come_first_and_prompts_share_what_is_left():
    sim = make(max_num_batched_tokens=10, overlap=False)
    a, b, c = request([2] * 4), request([3] * 20), request([4] * 20)
    sim.add_all(a)
    sim.step()
    sim.add_all(b, c)
    plan = sim.dispatch()
    assert [row.request for row in plan.decode] == [a]
    assert prefill(plan) == {b: 9}
    sim.commit()
    sim.step()
    assert prefill(sim.dispatch()) == {b: 2, c: 7}
    sim.drain()


def test_long_prompt_is_cut_by_its_threshold():
    sim = make(long_prefill_token_threshold=6)
    a, b = request([2] * 20), request([3] * 4)
    sim.add_all(a, b)
    assert prefill(sim.dispatch()) == {a: 6, b: 4}
    sim.drain()


def test_prefill_region_holds_max_prefill_seqs():
    sim = make(max_prefill_seqs=2)
    requests = [request([2] * 3) for _ in range(3)]
    sim.add_all(*requests)
    assert list(prefill(sim.dispatch())) == requests[:2]
    sim.drain()


def test_running_sequences_never_exceed_max_num_seqs():
    sim = make(max_num_seqs=2)
    sim.add_all(*(request([2] * 3) for _ in range(5)))
    sim.dispatch()
    stats = sim.scheduler.stats()
    assert (stats.num_requests_running, stats.num_requests_waiting) == (2, 3)
    sim.drain()


def test_without_chunks_a_prompt_waits_until_it_fits_whole():
    sim = make(enable_chunked_prefill=False, max_num_batched_tokens=64, overlap=False)
    a, b = request([2] * 50), request([3] * 20)
    sim.add_all(a, b)
    assert prefill(sim.dispatch()) == {a: 50}
    sim.commit()
    plan = sim.dispatch()
    assert len(plan.decode) == 1
    assert prefill(plan) == {b: 20}
    sim.drain()


def test_decode_row_is_the_same_object_every_step():
    sim = make(overlap=False)
    sim.add(request([2] * 3, max_tokens=6))
    sim.step()
    first = sim.dispatch().decode[0]
    sim.commit()
    assert sim.dispatch().decode[0] is first
    sim.drain()


def test_overlap_schedules_a_decode_before_its_token_is_known():
    sim = make()
    a = request([2] * 3)
    sim.add(a)
    sim.dispatch()
    plan = sim.dispatch()
    assert [row.request for row in plan.decode] == [a]
    assert (a.num_tokens, a.num_computed_tokens, a.num_in_flight) == (3, 4, 2)
    sim.drain()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_no_row_is_scheduled_beyond_max_tokens(overlap, max_tokens):
    sim = make(overlap=overlap)
    a = request([2] * 3, max_tokens=max_tokens)
    sim.add(a)
    sim.drain_requests()
    assert len(a.output_token_ids) == sim.seen["steps"] == max_tokens  # one prefill, then one token a step
    sim.drain()


@pytest.mark.parametrize("overlap", [False, True])
def test_no_row_is_scheduled_beyond_max_model_len(overlap):
    sim = make(overlap=overlap, max_model_len=8)
    a = request([2] * 5, max_tokens=99)
    sim.add(a)
    sim.drain_requests()
    assert (len(a.output_token_ids), sim.seen["steps"], a.finish_reason) == (3, 3, "length")
    sim.drain()


def test_priority_lower_value_goes_first_and_ties_go_by_arrival():
    sim = make(policy="priority", max_num_seqs=1)
    requests = [
        request([2] * 3, max_tokens=1, priority=priority, request_id=i) for i, priority in enumerate([1, 0, 1, -1])
    ]
    sim.add_all(*requests)
    sim.drain_requests()
    assert list(sim.ended) == [3, 1, 0, 2]


def test_fcfs_does_not_look_at_priority():
    sim = make(max_num_seqs=1)
    sim.add_all(*(request([2] * 3, max_tokens=1, priority=-i, request_id=i) for i in range(3)))
    sim.drain_requests()
    assert list(sim.ended) == [0, 1, 2]


# Admission


def test_whole_prompt_must_fit_before_it_is_admitted():
    sim = make(pages_per_rank=9, max_num_batched_tokens=8)  # 8 pages
    a, b = request([2] * 20, max_tokens=1), request([3] * 20, max_tokens=1)
    sim.add_all(a, b)
    sim.run(3)
    assert (len(a.page_ids), b.status) == (5, Status.WAITING)
    sim.drain()


def test_without_reservation_pages_come_chunk_by_chunk():
    sim = make(pages_per_rank=9, max_num_batched_tokens=8, reserve_full_isl=False)
    a = request([2] * 20)
    sim.add(a)
    sim.dispatch()
    assert len(a.page_ids) == 2
    sim.drain()


def test_watermark_keeps_pages_free_but_a_lone_request_may_have_them():
    sim = make(pages_per_rank=9, watermark=0.5)
    a, b = request([2] * 20), request([3] * 3)
    sim.add_all(a, b)
    sim.dispatch()
    assert (a.status, b.status) == (Status.RUNNING, Status.WAITING)
    sim.drain()


def test_idle_hits_count_as_consumed_and_a_failed_admission_changes_nothing():
    sim = make(pages_per_rank=9)  # 8 pages
    prompt = list(range(2, 2 + 20))
    sim.add(request(prompt, max_tokens=1))
    sim.drain_requests()  # 5 cached pages, 3 blank
    holder = request([9] * 9, max_tokens=20)  # takes the 3 blank ones
    again = request([*prompt[:16], 9])  # 4 idle hits and 1 new page: 5 of 5
    greedy = request([*prompt[:16], *[9] * 5])  # 4 idle hits and 2 new pages: 6 of 5
    sim.add_all(holder, greedy)
    sim.dispatch()
    assert (holder.status, greedy.status) == (Status.RUNNING, Status.WAITING)
    assert all(sim.pool.refs(page) == 0 for page in sim.scheduler.cache.match(greedy))
    sim.finish(greedy, "abort")
    sim.add(again)
    sim.dispatch()
    assert again.num_cached_tokens == 16
    assert sim.pool.num_available == 0
    sim.drain()


def test_prompt_larger_than_the_pool_is_refused_and_the_queue_goes_on():
    sim = make(pages_per_rank=5)
    scheduler = sim.scheduler
    with pytest.raises(PoolTooSmall, match="must fit the KV pool of 16 tokens, got 17 tokens; shorten it or enlarge"):
        scheduler.add(request([2] * 17))
    whole = request([2] * 16, max_tokens=9)
    sim.add_all(whole, request([3] * 3))
    sim.drain()
    assert (len(whole.output_token_ids), whole.finish_reason) == (1, "length")


@pytest.mark.parametrize(
    ("num_prompt", "message"),
    [
        (0, "at least one token, got none"),
        (64, "shorter than max_model_len 64 .* got 64 tokens"),
        (99, "got 99 tokens"),
    ],
)
def test_prompt_that_leaves_no_room_is_refused(num_prompt, message):
    with pytest.raises(ValueError, match=message):
        bare().add(request([2] * num_prompt))


def test_prompt_one_short_of_max_model_len_gets_exactly_one_token():
    sim = make(max_model_len=64)
    a = request([2] * 63, max_tokens=10)
    sim.add(a)
    sim.drain()
    assert (len(a.output_token_ids), a.finish_reason) == (1, "length")


def test_empty_queue_takes_a_prompt_beyond_the_token_limit():
    sim = make(max_num_queued_tokens=10)
    sim.add_all(request([2] * 20))
    sim.drain()


def test_too_many_waiting_requests_are_refused_until_one_leaves():
    sim = make(max_num_queued_reqs=2)
    a, b = request([2] * 3), request([2] * 3)
    sim.add_all(a, b)
    with pytest.raises(QueueFull, match="max_num_queued_reqs is 2 and as many requests wait; try again later"):
        sim.scheduler.add(request([2] * 3))
    sim.finish(a, "abort")
    sim.add_all(request([2] * 3))
    sim.drain()


def test_too_many_waiting_tokens_are_refused_until_they_run():
    sim = make(max_num_queued_tokens=10)
    sim.add_all(request([2] * 8))
    with pytest.raises(QueueFull, match="max_num_queued_tokens is 10, 8 wait and this prompt has 3"):
        sim.scheduler.add(request([2] * 3))
    sim.dispatch()
    sim.add_all(request([2] * 10))
    sim.drain()


# Ends


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
    chunk = take(scheduler, scheduler.schedule(0.0), [], logprobs=["x"], prompt_logprobs=["chunk"])
    assert [update[1:] for update in chunk] == [([], None, None, None, "chunk")]
    last = take(scheduler, scheduler.schedule(0.0), [5], logprobs=["token"], prompt_logprobs=["rest"])
    assert [update[1:] for update in last] == [([5], None, None, "token", "rest")]
    assert take(scheduler, scheduler.schedule(0.0), [5], logprobs=["next"])[0].logprobs == "next"


def test_chunk_without_prompt_logprobs_makes_no_update():
    scheduler = bare(max_num_batched_tokens=4)
    scheduler.add(request([2] * 6))
    assert take(scheduler, scheduler.schedule(0.0), []) == []


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


# Aborts, in every state


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


# n > 1


def test_followers_wait_for_the_leaders_prompt_and_share_it():
    sim = make(max_num_batched_tokens=8)
    prompt = list(range(2, 12))
    leader = request(prompt)
    followers = [request(prompt, leader=leader, sampling=i) for i in (1, 2)]
    other = request([3] * 3)
    sim.add_all(leader, *followers, other)
    assert prefill(sim.dispatch()) == {leader: 8}
    assert prefill(sim.dispatch()) == {leader: 2, other: 3}  # nobody waits behind the followers
    sim.commit()
    assert prefill(sim.dispatch()) == {}
    sim.commit()  # the leader's last chunk
    assert prefill(sim.dispatch()) == dict.fromkeys(followers, 2)
    assert [each.num_cached_tokens for each in followers] == [8, 8]
    assert followers[0].page_ids[:2] == leader.page_ids[:2]
    sim.drain()


@pytest.mark.parametrize("end", ["follower", "leader", "both"])
def test_abort_of_leader_or_follower_leaves_the_others_well(end):
    sim = make()
    prompt = list(range(2, 12))
    leader = request(prompt)
    followers = [request(prompt, leader=leader, sampling=i) for i in (1, 2)]
    sim.add_all(leader, *followers)
    sim.dispatch()
    for each in {"follower": followers[:1], "leader": [leader], "both": [followers[0], leader]}[end]:
        sim.finish(each, "abort")
    sim.drain()
    assert followers[1].finish_reason == "length"


def test_followers_that_cannot_share_do_not_wait():
    for options, config in (({"prompt": [2] * 4}, {}), ({"prompt": [2] * 9}, {"prefix_caching": False})):
        sim = make(**config)
        leader = request(options["prompt"])
        follower = request(options["prompt"], leader=leader)
        sim.add_all(leader, follower)
        assert set(prefill(sim.dispatch())) == {leader, follower}
        sim.drain()


# Layer spans


def test_tokens_count_as_computed_only_after_the_last_layer():
    sim = make(spans=True, overlap=False)
    a = request([2] * 9)
    sim.add(a)
    plan = sim.dispatch()
    while not plan.completes:
        assert (a.num_computed_tokens, plan.prefill[0].samples, sim.pool.num_cached) == (0, False, 0)
        sim.commit()
        assert a.num_published_pages == 0
        lo = plan.span[1]
        plan = sim.dispatch()
        assert plan.span[0] == lo
    assert (a.num_computed_tokens, plan.prefill[0].samples) == (9, True)
    sim.commit()
    assert a.num_published_pages == 2
    sim.drain()


# Bookkeeping


def test_stats_tell_what_is_going_on():
    sim = make(pages_per_rank=9)
    sim.add_all(request([2] * 7), request([3] * 5))
    sim.dispatch()
    stats = sim.scheduler.stats()
    assert (stats.num_requests_running, stats.num_requests_waiting, stats.kv_cache_usage_perc) == (2, 0, 0.5)
    assert (stats.num_preemptions, stats.prefix_cache_queries, stats.prefix_cache_hits) == (0, 12, 0)
    sim.drain()


def test_first_scheduled_time_is_kept():
    sim = make()
    a = request([2] * 3)
    sim.add(a)
    sim.now = 4.5
    sim.step()
    sim.now = 9.0
    sim.drain()
    assert a.first_scheduled_time == 4.5


def test_the_fake_runner_samples_eos_now_and_then():
    assert {sample(h, 0) for h in range(200)} >= {EOS}


def test_importing_the_scheduler_imports_neither_jax_nor_numpy():
    code = "import sys, jaxserve.scheduler; assert not {'jax', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"max_prefill_seqs": 0}, "max_prefill_seqs must be at least 1, got 0"),
        ({"policy": "lifo"}, "policy must be 'fcfs' or 'priority', got 'lifo'"),
        ({"watermark": 1.0}, r"watermark must be in \[0, 1\), got 1.0"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold must be >= 0, got -1"),
        ({"max_num_queued_reqs": 0}, "max_num_queued_reqs must be None or at least 1, got 0"),
        ({"max_num_batched_tokens": 16}, "max_num_batched_tokens 16 < max_num_seqs 32"),
        ({"enable_chunked_prefill": False}, "max_num_batched_tokens 512 < max_model_len 2048"),
        (
            {"enable_chunked_prefill": False, "max_model_len": 512, "long_prefill_token_threshold": 9},
            "must be 0 without chunked prefill, got 9",
        ),
    ],
)
def test_config_names_what_is_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(**options)
