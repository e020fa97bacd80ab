"""Who is let in, who waits and who is refused."""

import pytest
from scripted import bare, make, request

from jaxserve.scheduler import PoolTooSmall, QueueFull, Status


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
