"""Too few pages: who gives way, what becomes of it, and that somebody always gets on."""

import pytest
from scripted import make, request

from jaxserve.scheduler import DecodeRow, PageUpdate, SchedulerConfig, Status
from jaxserve.scheduler.plan import Draft


def two_that_outgrow_the_pool(**config):
    """Six usable pages; each request ends with five."""
    sim = make(pages_per_rank=7, **config)
    old, young = request([2] * 7, max_tokens=12), request([3] * 7, max_tokens=12)
    sim.add_all(old, young)
    return sim, old, young


@pytest.mark.parametrize("overlap", [False, True])
def test_output_is_the_same_as_without_preemption(overlap):
    sim, old, young = two_that_outgrow_the_pool(overlap=overlap)
    sim.drain()  # the simulation compares every token with an undisturbed run
    assert (old.num_preemptions, young.num_preemptions) == (0, 1)
    assert sim.seen["preemptions in flight"] == overlap
    assert sim.scheduler.stats().num_preemptions == 1
    assert len(young.output_token_ids) == 12


def test_preempted_request_is_in_front_of_later_arrivals():
    sim, _, young = two_that_outgrow_the_pool(max_num_seqs=2)
    later = request([4] * 3, max_tokens=2)
    sim.add_all(later)
    while not young.num_preemptions:
        sim.step()
    assert sim.scheduler.waiting.first() is young
    assert (young.status, young.slot, young.num_computed_tokens, young.page_ids) == (Status.WAITING, -1, 0, [])
    assert later in sim.scheduler.waiting
    sim.drain()


def test_stale_token_of_a_preempted_request_is_dropped():
    sim, _, young = two_that_outgrow_the_pool()
    while not young.num_preemptions:
        sim.dispatch()
        if len(sim.in_flight) > 1 and not young.num_preemptions:
            sim.commit()
    assert any(row.request is young for plan, *_ in sim.in_flight for row in plan.decode)
    num_outputs = len(young.output_token_ids)
    while sim.in_flight:
        sim.commit()
    assert len(young.output_token_ids) == num_outputs
    assert young.num_in_flight == 0
    sim.drain()


def test_resumed_request_computes_prompt_and_output_anew_and_then_decodes():
    sim, _, young = two_that_outgrow_the_pool(prefix_caching=False, overlap=False)
    while not young.num_preemptions:
        sim.step()
    known = young.prompt_token_ids + young.output_token_ids
    plan = sim.dispatch()
    while young not in [row.request for row in plan.prefill]:
        sim.commit()
        plan = sim.dispatch()
    (row,) = plan.prefill
    assert (row.start, row.token_ids, row.samples, row.epoch) == (0, known, True, 1)
    sim.commit()
    assert [row.request for row in sim.dispatch().decode][-1] is young
    sim.drain()


def test_victim_already_in_the_step_is_withdrawn_and_its_budget_given_on():
    # `low` decodes; `high` comes later but goes first, and needs its pages in the middle of its prompt.
    sim = make(
        pages_per_rank=6,
        policy="priority",
        reserve_full_isl=False,
        overlap=False,
        max_num_seqs=3,
        max_num_batched_tokens=9,
    )
    low, high, next_one = (request([p] * n, max_tokens=8, priority=p) for p, n in ((9, 3), (0, 16), (1, 3)))
    sim.add_all(low)
    sim.step()
    sim.add_all(high, next_one)
    plan = sim.dispatch()
    assert [row.request for row in plan.decode] == [low]
    assert {row.request: len(row.token_ids) for row in plan.prefill} == {high: 8}
    sim.commit()
    while not low.num_preemptions:
        plan = sim.dispatch()
        assert len(plan.decode) + plan.num_prefill_tokens <= 9
        sim.commit()
    assert low not in [row.request for row in (*plan.decode, *plan.prefill)]
    assert high in [row.request for row in plan.prefill]
    sim.drain()


def test_withdrawing_gives_the_budget_back_and_keeps_the_others():
    a, b = request([2]), request([3])
    rows = [DecodeRow(a, 0, 0), DecodeRow(b, 0, 1)]
    config = SchedulerConfig(max_num_batched_tokens=12, max_num_seqs=2)
    draft = Draft(step=1, config=config, decode=list(rows), page_updates=[PageUpdate(0, 1, 5), PageUpdate(1, 2, 6)])
    assert draft.budget == 10
    draft.withdraw(b, rows[1])
    assert (draft.budget, draft.decode, draft.page_updates) == (11, rows[:1], [PageUpdate(0, 1, 5)])
    draft.prefill[b] = 4
    draft.new_slots.append(b)
    assert draft.budget == 7
    draft.withdraw(b, rows[1])
    assert (draft.budget, draft.prefill, draft.new_slots) == (11, {}, [])


def test_one_victim_is_taken_for_one_page_while_its_pages_are_fenced():
    sim = make(pages_per_rank=7, max_num_seqs=3)  # 6 pages, 3 x 2 when the prompts are in
    requests = [request([p] * 7, max_tokens=9) for p in (2, 3, 4)]
    sim.add_all(*requests)
    sim.dispatch()  # 7 tokens each, and a token in flight
    sim.dispatch()  # position 7 fills the second page
    sim.commit()
    plan = sim.dispatch()  # position 8: the first two need a page, all pages are held
    assert plan is None
    assert [each.num_preemptions for each in requests] == [0, 0, 1]
    assert sim.dispatch() is None  # asking again takes nobody else
    assert sim.scheduler.stats().num_preemptions == 1
    sim.commit()
    assert [row.request for row in sim.dispatch().decode] == requests[:2]  # the last one's pages have come
    sim.drain()


def test_last_request_waits_for_pages_rather_than_giving_its_own_up():
    sim = make(pages_per_rank=5, max_num_seqs=2, overlap=False)  # 4 pages
    old, young = request([2] * 4, max_tokens=5), request([3] * 8, max_tokens=5)
    sim.add_all(old, young)
    sim.step()
    while old.finish_reason is None:
        assert [row.request for row in sim.dispatch().decode] == [old]  # it took the last page
        assert len(young.page_ids) == 2
        sim.commit()
    assert [row.request for row in sim.dispatch().decode] == [young]
    sim.drain()
    assert young.num_preemptions == 0


def test_nobody_is_admitted_in_a_step_that_lacks_pages():
    sim, _, young = two_that_outgrow_the_pool(max_num_seqs=3)
    while not young.num_preemptions:
        sim.add(request([5]))
        before = sim.scheduler.stats().num_preemptions
        plan = sim.dispatch()
        if sim.scheduler.stats().num_preemptions > before:
            assert plan is None or not plan.new_slots
        if sim.in_flight and (plan is None or len(sim.in_flight) > 1):
            sim.commit()
    sim.drain()


@pytest.mark.parametrize("reserve", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_two_long_prompts_that_do_not_fit_together_both_end(reserve, overlap):
    sim = make(pages_per_rank=9, long_prefill_token_threshold=4, reserve_full_isl=reserve, overlap=overlap)
    sim.add_all(request([2] * 24, max_tokens=6), request([3] * 24, max_tokens=6))  # they load side by side if they may
    sim.drain()
    assert (sim.scheduler.stats().num_preemptions == 0) == reserve


@pytest.mark.parametrize("num_pages", [3, 4, 5])
@pytest.mark.parametrize("overlap", [False, True])
def test_every_request_ends_once_on_the_smallest_pools(num_pages, overlap):
    sim = make(pages_per_rank=num_pages, overlap=overlap, max_num_seqs=4)
    requests = [request([p] * 3, max_tokens=4) for p in (2, 3, 4, 5)]
    sim.add_all(*requests)
    sim.drain(max_steps=200)
    assert set(sim.ended) == {each.request_id for each in requests}


def test_first_in_the_order_is_never_preempted_by_others():
    sim = make(pages_per_rank=9, max_num_seqs=4, policy="priority")
    first = request([2] * 3, max_tokens=20, priority=0)
    sim.add_all(*(request([p] * 3, max_tokens=20, priority=p) for p in (3, 4, 5)), first)
    sim.drain()
    assert first.num_preemptions == 0
    assert sim.scheduler.stats().num_preemptions > 0
