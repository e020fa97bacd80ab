"""What layered prefill is for, on a device that only takes time (virtual_time.py): the same figures on any machine."""

import math
import random
import statistics

import pytest
from virtual_time import dense_s, moe_s, poisson, serve

TARGET_MS = 25.0
FIXED = {
    "chunked 512": {"budget": 512},
    "chunked 2048": {"budget": 2048},
    "chunked 8192": {"budget": 8192},
    "layered": {"prefill": "layered", "target_tbt_ms": TARGET_MS, "prefill_order": "shortest"},
}


def long_prompts(rng: random.Random) -> tuple[int, int]:
    """As of papers to summarise."""
    return min(32_000, int(rng.lognormvariate(math.log(9194) - 0.125, 0.5))), 1 + int(rng.expovariate(1 / 230))


def chats(rng: random.Random) -> tuple[int, int]:
    return min(12_000, int(rng.lognormvariate(math.log(1730), 0.8))), 1 + int(rng.expovariate(1 / 439))


def short_beside_long(rng: random.Random) -> tuple[int, int]:
    return 8192 if rng.random() < 0.33 else rng.randint(32, 511), 100


def ttft(served):
    return statistics.fmean(one.ttft for one in served)


def tbt_p99(served):
    return statistics.quantiles([gap for one in served for gap in one.tbts], n=100)[98]


def attainment(served):
    """The share of requests with their first token in half a second, long ones in two, and gaps near the target."""

    def is_met(one):
        gaps = sorted(one.tbts)
        steady = not gaps or gaps[int(0.99 * len(gaps))] <= 1.1e-3 * TARGET_MS
        return steady and one.ttft <= (0.5 if one.prompt_len < 2048 else 2.0)

    return statistics.fmean(is_met(one) for one in served)


def test_layers_give_experts_models_the_first_token_of_large_chunks_and_the_pace_of_small_ones():
    load = poisson(2.0, 60, long_prompts)
    layered = serve(load, moe_s, prefill="layered")
    small, large = serve(load, moe_s, budget=512), serve(load, moe_s, budget=8192)
    assert tbt_p99(layered) <= tbt_p99(small)
    assert ttft(layered) <= 0.5 * ttft(small)
    assert ttft(layered) <= 1.4 * ttft(large)
    assert tbt_p99(large) > 4 * tbt_p99(layered)


def test_short_prompts_overtake_and_long_ones_hardly_wait_for_it():
    load = poisson(5.0, 60, short_beside_long)
    patient = serve(load, moe_s, prefill="layered")
    overtaking = serve(load, moe_s, prefill="layered", prefill_order="shortest")
    busy = [(one.arrival, one.times[0]) for one in patient if one.prompt_len == 8192]
    beside = [i for i, one in enumerate(patient) if one.prompt_len < 512 and any(a < one.arrival < b for a, b in busy)]
    assert len(beside) > 50
    assert ttft([overtaking[i] for i in beside]) <= 0.4 * ttft([patient[i] for i in beside])
    long = [i for i, one in enumerate(patient) if one.prompt_len == 8192]
    assert ttft([overtaking[i] for i in long]) <= 1.15 * ttft([patient[i] for i in long])


@pytest.mark.parametrize("step_s", [dense_s, moe_s])
@pytest.mark.parametrize(("rate", "lengths"), [(2.0, long_prompts), (7.0, chats)])
def test_steps_keep_to_the_target(step_s, rate, lengths):
    served = serve(poisson(rate, 40, lengths), step_s, prefill="layered", target_tbt_ms=TARGET_MS)
    assert tbt_p99(served) <= 1.1e-3 * TARGET_MS


@pytest.mark.parametrize("step_s", [dense_s, moe_s])
@pytest.mark.parametrize(("rate", "lengths"), [(2.0, long_prompts), (7.0, chats), (6.0, short_beside_long)])
def test_auto_does_as_well_as_the_best_fixed_choice(step_s, rate, lengths):
    load = poisson(rate, 40, lengths, seed=1)
    best = max(attainment(serve(load, step_s, **options)) for options in FIXED.values())
    auto = serve(load, step_s, prefill="auto", target_tbt_ms=TARGET_MS, prefill_order="shortest")
    assert attainment(auto) >= 0.95 * best > 0.8


def test_half_as_many_deadlines_are_missed_in_the_order_of_slack():
    decoding = [(0.0, 16, 8000)] * 8
    load = sorted([*decoding, *poisson(4.0, 60, short_beside_long)])

    def deadline(prompt_len):
        return None if prompt_len == 16 else 0.08 if prompt_len < 512 else 1.5

    def met(order):
        served = serve(load, moe_s, prefill="layered", prefill_order=order, first_token_within=deadline)
        hurried = [one for one in served if one.prompt_len > 16]
        return statistics.fmean(bool(one.times) and one.ttft <= deadline(one.prompt_len) for one in hurried)

    assert 1 - met("slack") < 0.5 * (1 - met("fcfs"))
