"""Layered prefill: cohorts, groups, orders and what "auto" chooses, over the checked runner of simulation.py."""

import pytest
from scripted import make, request
from simulation import NUM_LAYERS

from jaxserve.scheduler import Cohort, LayeredPrefill, SchedulerConfig, layered
from jaxserve.scheduler.layered import borders, spans
from jaxserve.scheduler.plan import Draft
from jaxserve.scheduler.step_time import StepWork


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    monkeypatch.setattr(layered, "TOKENS_OF_A_GROUP", 4)


def make_layered(**config):
    """A simulation in which one request decodes, with its prompts layered and no step in flight."""
    sim = make(**{"prefill": "layered", "overlap": False, "max_model_len": 96, "pages_per_rank": 64} | config)
    decoder = request([15], max_tokens=60)
    sim.add(decoder)
    sim.run(2)
    return sim, decoder


def who(plan):
    return [row.request for row in plan.prefill]


def test_without_decodes_a_prompt_passes_all_layers_at_once():
    sim = make(prefill="layered")
    sim.add(request([2] * 20))
    plan = sim.dispatch()
    assert (plan.span, plan.completes, plan.num_prefill_tokens) == (None, True, 20)
    sim.drain()


@pytest.mark.parametrize(("num_tokens", "groups"), [(4, 1), (5, 2), (8, 2), (9, 4), (16, 4), (28, 4)])
def test_the_papers_rule_gives_each_group_the_work_of_so_many_tokens(num_tokens, groups):
    sim, decoder = make_layered()
    sim.add(request([2] * num_tokens))
    for span in spans(NUM_LAYERS, groups):
        plan = sim.dispatch()
        sim.commit()
        assert [row.request for row in plan.decode] == [decoder]  # stall-free
        assert (plan.span or (0, NUM_LAYERS), plan.completes) == (span, span[1] == NUM_LAYERS)
    sim.drain()


def test_tokens_count_as_computed_only_after_the_last_layer():
    sim, _ = make_layered()
    a = request([2] * 9)
    sim.add(a)
    for lo in range(3):
        plan = sim.dispatch()
        assert (plan.span, plan.completes) == ((lo, lo + 1), False)
        sim.commit()
        assert (a.num_computed_tokens, plan.prefill[0].samples, a.num_published_pages) == (0, False, 0)
    plan = sim.dispatch()
    assert (plan.completes, a.num_computed_tokens, plan.prefill[0].samples) == (True, 9, True)
    sim.commit()
    assert a.num_published_pages == 2
    sim.drain()


def test_nobody_joins_a_cohort_in_flight():
    sim, _ = make_layered()
    a, b = request([2] * 9), request([3] * 9)
    sim.add(a)
    sim.step()
    sim.add(b)
    for _ in range(3):
        assert who(sim.dispatch()) == [a]
        sim.commit()
    assert who(sim.dispatch()) == [b]
    sim.commit()
    sim.drain()


def test_a_prompt_over_the_budget_is_cut_and_each_cut_passes_all_groups():
    sim, _ = make_layered()
    a = request([2] * 40)
    sim.add(a)
    for start, num_tokens in [(0, 28), (28, 12)]:  # the budget of 32, less what all decodes may come to need
        for span in spans(4, 4):
            plan = sim.dispatch()
            sim.commit()
            row = plan.prefill[0]
            assert (row.start, len(row.token_ids), plan.span) == (start, num_tokens, span)
    assert row.samples
    sim.drain()


def test_cached_tokens_are_not_in_the_cohort():
    sim, _ = make_layered()
    a = request([2] * 9)
    sim.add(a)
    while a.status.value != "finished":
        sim.step()
    b = request([2] * 9)
    sim.add(b)
    plan = sim.dispatch()
    assert (plan.prefill[0].start, plan.num_prefill_tokens, plan.span) == (8, 1, None)
    sim.commit()
    sim.drain()


def test_who_leaves_keeps_rows_that_nobody_else_gets():
    sim, _ = make_layered()
    a, b, c = (request([2 + i] * 5) for i in range(3))
    sim.add_all(a, b, c)
    plan = sim.dispatch()
    sim.commit()
    assert plan.places() == [(0, 0), (1, 5), (2, 10)]
    sim.finish(b, "abort")
    plan = sim.dispatch()
    sim.commit()
    assert (who(plan), plan.places(), plan.cohort.num_tokens) == ([a, c], [(0, 0), (2, 10)], 15)
    sim.drain()


def test_who_was_preempted_and_came_back_is_in_the_cohort_no_more():
    a, b = request([2] * 4), request([3] * 5)
    cohort = Cohort.of({a: 4, b: 5})
    assert cohort.live() == {a: 4, b: 5}
    a.epoch, a.slot = 1, 3
    assert cohort.live() == {b: 5}


def test_a_cohort_that_nobody_is_left_of_makes_room():
    sim, _ = make_layered()
    a, b = request([2] * 9), request([3] * 2)
    sim.add(a)
    sim.step()
    sim.finish(a, "abort")
    sim.add(b)
    plan = sim.dispatch()
    assert (who(plan), plan.span) == ([b], None)
    sim.commit()
    sim.drain()


# Orders


def overtaken(first, second, **config):
    """Whether `second`, which came while `first` was in flight, went before it."""
    sim, _ = make_layered(**config)
    sim.add(first)
    sim.step()
    sim.add(second)
    plan = sim.dispatch()
    sim.commit()
    result = who(plan) == [second]
    assert result or who(plan) == [first]
    sim.drain()
    assert sim.ended[first.request_id] == sim.ended[second.request_id] == ("length", None)
    return result


@pytest.mark.parametrize(("order", "expected"), [("fcfs", False), ("shortest", True)])
def test_a_short_prompt_overtakes_a_long_one_where_the_order_says_so(order, expected):
    assert overtaken(request([2] * 20), request([3] * 3), prefill_order=order) == expected


def test_a_longer_prompt_does_not_overtake():
    assert not overtaken(request([2] * 8), request([3] * 9), prefill_order="shortest")


def test_what_is_left_of_a_cohort_counts_not_what_it_began_with():
    sim, _ = make_layered(prefill_order="shortest")
    a, b = request([2] * 12), request([3] * 5)
    sim.add(a)
    sim.run(3)  # 3 of 4 layers: as much as 3 tokens are left
    sim.add(b)
    assert who(sim.dispatch()) == [a]
    sim.commit()
    sim.drain()


def test_a_prompt_that_waits_long_enough_is_overtaken_no_more():
    long, short = request([2] * 20, arrival_time=1.0), request([3] * 3, arrival_time=1.001)
    assert overtaken(long, short, prefill_order="shortest")
    long, short = request([2] * 20, arrival_time=1.0), request([3] * 3, arrival_time=1.02)
    assert not overtaken(long, short, prefill_order="shortest")


def test_a_more_important_prompt_overtakes_between_two_groups():
    first, second = request([2] * 9, priority=1), request([3] * 12, priority=0)
    assert not overtaken(first, second)
    first, second = request([2] * 9, priority=1), request([3] * 12, priority=0)
    assert overtaken(first, second, policy="priority")
    first, second = request([2] * 9, priority=0), request([3] * 2, priority=1)
    assert not overtaken(first, second, policy="priority", prefill_order="shortest")


def test_the_earliest_deadline_goes_first_and_late_ones_last():
    early, late, none = {"deadline": 50.0}, {"deadline": 90.0}, {}
    for first, second, expected in [(late, early, True), (early, late, False), (none, late, True), (late, none, False)]:
        assert overtaken(request([2] * 9, **first), request([3] * 9, **second), prefill_order="slack") == expected


def test_who_cannot_meet_his_deadline_overtakes_nobody():
    policy = LayeredPrefill(SchedulerConfig(prefill="layered", prefill_order="slack"), 4)
    train(policy)
    draft = Draft(step=1, config=policy_config(), now=10.0, num_decodes=1)
    seconds = 100 * policy._token_s(draft)
    assert seconds > 0.1
    can, cannot = request([2] * 100, deadline=10.0 + 1.1 * seconds), request([2] * 100, deadline=10.0 + 0.9 * seconds)
    chosen, _ = policy.choose(draft, [cannot, can])
    assert chosen[0] is can


def test_an_overtaken_cohort_goes_on_where_it_stood():
    sim, _ = make_layered(prefill_order="shortest")
    a, b, c = request([2] * 20), request([3] * 10), request([4] * 3)
    sim.add(a)
    sim.step()
    sim.add(b)
    sim.step()
    sim.add(c)
    found = []
    for _ in range(7):
        plan = sim.dispatch()
        sim.commit()
        found.append((who(plan), plan.span))
    assert found == [([c], None)] + [([b], span) for span in spans(4, 4)[1:]] + [([a], s) for s in spans(4, 4)[1:]]
    sim.drain()


def test_so_many_cohorts_may_stand_at_once():
    sim, _ = make_layered(prefill_order="shortest", max_num_seqs=16, max_num_batched_tokens=64)
    prompts = [request([2 + i] * num_tokens) for i, num_tokens in enumerate((40, 20, 10, 6, 2))]
    for prompt in prompts:
        sim.add(prompt)
        sim.step()
    begun = [prompt for prompt in prompts if prompt.slot >= 0]
    assert begun == prompts[: layered.MAX_COHORTS]
    sim.drain()


def test_others_join_the_shortest_only_where_it_need_not_wait_for_them():
    sim, _ = make_layered(prefill_order="shortest", max_num_seqs=8)
    a, b, c = request([2] * 3), request([3] * 1), request([4] * 9)
    sim.add_all(c, a, b)
    assert set(who(sim.dispatch())) == {a, b}  # 4 tokens together, as many as pass at once
    sim.commit()
    assert who(sim.dispatch()) == [c]
    sim.commit()
    sim.drain()


def test_an_overtaker_that_finds_no_pages_lets_the_cohort_go_on():
    sim, _ = make_layered(prefill_order="shortest", pages_per_rank=9)
    a, b = request([2] * 24, max_tokens=1), request([3] * 9)
    sim.add(a)
    sim.step()
    sim.add(b)
    plan = sim.dispatch()
    assert who(plan) == [a]
    sim.commit()
    sim.drain()


# Programs that are not ready, targets, and "auto"


def test_chunks_stand_in_for_groups_whose_programs_are_not_ready():
    asked = []
    sim, decoder = make_layered()
    sim.scheduler._prefill._programs = lambda *args: asked.append(args)
    a = request([2] * 9)
    sim.add(a)
    plan = sim.dispatch()
    assert (plan.span, plan.num_prefill_tokens, plan.decode[0].request) == (None, 3, decoder)
    assert asked == [(9, 1, spans(4, 4))]
    sim.commit()
    sim.drain()


def train(policy, *, base=0.0004, token=0.01, layers=0.0):
    """Steps that take `base`, and for the layers that prompts pass, `layers` and `token` for each token."""
    for i in range(400):
        work = StepWork(1 + i % 2, 10)
        if i % 5:
            work = work._replace(num_prefill_tokens=(16, 4, 9, 28)[i % 4], share=(0.25, 0.5, 1.0)[i % 3])
        seconds = base + work.share * (layers + token * work.num_prefill_tokens)
        policy.step_time.observe(work, seconds)


def policy_config(**options):
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64, "prefill": "layered"}
    return SchedulerConfig(**sizes | options)


@pytest.mark.parametrize(("target_ms", "groups"), [(300, 1), (160, 2), (90, 4), (30, 4)])
def test_the_fewest_groups_whose_step_meets_the_target(target_ms, groups):
    sim, _ = make_layered(target_tbt_ms=target_ms)
    train(sim.scheduler._prefill)  # 28 tokens: 284 ms at once, 144 by halves, 74 by quarters
    sim.add(request([2] * 28))
    plan = sim.dispatch()
    sim.commit()
    assert (plan.span or (0, 4)) == spans(4, groups)[0]
    sim.drain()


def test_before_steps_were_seen_the_papers_rule_stands_in_for_the_target():
    sim, _ = make_layered(target_tbt_ms=1000.0)
    sim.add(request([2] * 9))
    assert sim.dispatch().span == (0, 1)
    sim.commit()
    sim.drain()


@pytest.mark.parametrize(("layers_s", "span"), [(0.0, None), (0.05, (0, 1))])
def test_auto_takes_layers_where_each_chunk_pays_for_the_weights_again(layers_s, span):
    sim, _ = make_layered(prefill="auto")
    train(sim.scheduler._prefill, layers=layers_s)
    sim.add(request([2] * 24))
    plan = sim.dispatch()
    sim.commit()
    assert plan.span == span
    assert plan.num_prefill_tokens == (24 if span else 3)
    sim.drain()


def test_auto_takes_whole_prompts_where_there_is_nothing_to_protect():
    sim = make(prefill="auto")
    sim.add(request([2] * 24))
    assert sim.dispatch().num_prefill_tokens == 24
    sim.drain()


@pytest.mark.parametrize(("num_layers", "groups"), [(48, 16), (36, 16), (3, 4), (1, 2), (32, 1)])
def test_groups_part_the_layers_evenly(num_layers, groups):
    found = borders(num_layers, groups)
    sizes = [hi - lo for lo, hi in spans(num_layers, groups)]
    assert (found[0], found[-1], len(sizes)) == (0, num_layers, min(groups, num_layers))
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
