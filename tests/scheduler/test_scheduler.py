"""What one step holds; followers, layer spans and book-keeping."""

import subprocess
import sys

import pytest
from scripted import bare, make, request, take
from simulation import EOS, sample

from jaxserve.scheduler import SchedulerConfig


def prefill(plan):
    return {row.request: len(row.token_ids) for row in plan.prefill}


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


def test_prompts_are_cut_after_multiples():
    sim = make(prompt_multiple=4, max_num_batched_tokens=10, max_num_seqs=4, overlap=False)
    a, b, c = request([2] * 7), request([3] * 13), request([4] * 3)
    sim.add_all(a, b, c)
    assert prefill(sim.dispatch()) == {a: 7}  # the 3 tokens that are left are not enough for a part of b
    sim.commit()
    assert prefill(sim.dispatch()) == {b: 8}
    sim.commit()
    assert prefill(sim.dispatch()) == {b: 5, c: 3}
    sim.drain()


def test_a_cap_below_the_multiple_still_lets_a_prompt_go_on():
    sim = make(prompt_multiple=4, long_prefill_token_threshold=3)
    a = request([2] * 9)
    sim.add_all(a)
    assert [prefill(sim.dispatch()) for _ in range(3)] == [{a: 4}, {a: 4}, {a: 1}]
    sim.drain()


def test_prioritized_prompts_fill_steps_and_decodes_join_those_with_room():
    sim = make(prioritize_prefill=True, max_num_batched_tokens=10)
    a, b = request([2] * 6), request([3] * 13)
    sim.add_all(a)
    sim.step()
    sim.add_all(b)
    assert (prefill(sim.dispatch()), sim.in_flight[-1][0].decode) == ({b: 10}, [])
    sim.commit()
    plan = sim.dispatch()
    assert (prefill(plan), [row.request for row in plan.decode]) == ({b: 3}, [a])
    sim.drain()


def test_the_budget_pays_for_the_padding_of_decode_rows():
    sim = make(max_num_batched_tokens=10, padded_decode_rows=(0, 4), overlap=False)
    a, b = request([2] * 9), request([3] * 13)
    sim.add_all(a, b)
    assert prefill(sim.dispatch()) == {a: 9, b: 1}
    sim.commit()
    assert prefill(sim.dispatch()) == {b: 6}
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
        ({"prefill": "lazy"}, "prefill must be 'chunked', 'layered' or 'auto', got 'lazy'"),
        ({"prefill_order": "lifo"}, "prefill_order must be 'fcfs', 'shortest' or 'slack', got 'lifo'"),
        ({"prefill": "auto", "target_tbt_ms": -1.0}, "target_tbt_ms must be None or above 0, got -1.0"),
        ({"target_tbt_ms": 9.0}, "are for prefill 'layered' or 'auto', got target_tbt_ms 9.0"),
        ({"prefill": "layered", "enable_chunked_prefill": False}, "enable_chunked_prefill must be True, got False"),
        ({"prefill": "layered", "max_num_batched_tokens": 32}, "must be above 32, got 32; raise it"),
        ({"watermark": 1.0}, r"watermark must be in \[0, 1\), got 1.0"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold must be >= 0, got -1"),
        ({"max_num_queued_reqs": 0}, "max_num_queued_reqs must be None or at least 1, got 0"),
        ({"max_num_batched_tokens": 16}, "max_num_batched_tokens 16 < max_num_seqs 32"),
        ({"prompt_multiple": 481}, "cut after multiples of 481 tokens, so max_num_batched_tokens must be at least 513"),
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


def test_a_held_request_is_in_nobodys_way_and_keeps_its_place():
    sim = make(max_num_seqs=1)
    first, held, later = request([2] * 6), request([3] * 6, held=True), request([4] * 6)
    sim.add_all(first, held, later)
    sim.dispatch()
    assert sim.scheduler.stats().num_requests_waiting == 2
    sim.release(held)
    assert next(iter(sim.scheduler.waiting)) is held  # it came before `later`
    sim.drain_requests()
    assert [sim.ended[r.request_id][0] for r in (first, held, later)] == ["length"] * 3
    assert first.first_scheduled_time == held.first_scheduled_time == 0.0


def test_others_pass_a_held_request_and_it_may_end_before_it_is_released():
    sim = make()
    held, other = request([3] * 6, held=True), request([4] * 6)
    sim.add_all(held, other)
    assert prefill(sim.dispatch()) == {other: 6}
    while sim.in_flight:
        sim.step()
    assert sim.dispatch() is None  # nothing but the held one is left
    assert sim.scheduler.has_unfinished()
    sim.finish(held, "abort")
    assert not sim.scheduler.has_unfinished()


def test_a_sibling_waits_for_its_release_and_for_its_leader():
    sim = make()
    leader = request([2] * 10, held=True)
    siblings = [request([2] * 10, leader=leader, held=True) for _ in range(2)]
    sim.add_all(leader, *siblings)
    assert sim.dispatch() is None
    sim.release(siblings[0])
    sim.release(leader)
    assert prefill(sim.dispatch()) == {leader: 10}
    sim.dispatch()
    sim.commit()  # the prompt is published
    assert prefill(sim.dispatch()) == {siblings[0]: 2}
    sim.release(siblings[1])
    assert prefill(sim.dispatch()) == {siblings[1]: 2}
    sim.drain()


def test_a_row_without_a_possible_token_ends_its_request_as_an_error_and_no_other():
    scheduler = bare()
    dead, other = request([2] * 6), request([3] * 6)
    scheduler.add(dead)
    scheduler.add(other)
    plan = scheduler.schedule(0.0)
    updates = take(scheduler, plan, [-1], [5])
    assert [(u.new_token_ids, u.finish_reason) for u in updates] == [([], "error"), ([5], None)]
    assert (dead.output_token_ids, dead.finish_reason) == ([], "error")
    scheduler.pool.check()
    assert prefill(scheduler.schedule(0.0)) == {}
