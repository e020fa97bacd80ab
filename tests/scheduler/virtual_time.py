"""A device that only takes time: the scheduler under a load, with steps as long as a formula says. No clock.

The formulas are of a dense and of a mixture-of-experts model on one GPU, in round numbers; they are not the form that
jaxserve.scheduler.step_time fits. What they leave out is what the host adds.
"""

import dataclasses
import random
from collections.abc import Callable

from jaxserve.scheduler import PagePool, Request, Scheduler, SchedulerConfig, StepPlan, StepResult, prefill_policy

NUM_LAYERS = 48


def dense_s(plan: StepPlan) -> float:
    """8B parameters: weights are read once a step, by whoever passes."""
    tokens, share, pairs = _prefill(plan)
    compute = (len(plan.decode) + tokens * share) * 20e-6
    return 0.5e-3 + max(4e-3, compute) + plan.num_kv_tokens * 3e-8 + pairs * share * 6e-10


def moe_s(plan: StepPlan) -> float:
    """30B parameters, 8 of 128 experts a token: what is read of a layer grows with the tokens that pass it."""
    tokens, share, pairs = _prefill(plan)
    decodes = len(plan.decode)
    read = 3e-3 + 14e-3 * (_experts(decodes) * (1 - share) + _experts(decodes + tokens) * share)
    compute = (decodes + tokens * share) * 14e-6
    return 0.5e-3 + max(read, compute) + plan.num_kv_tokens * 2e-8 + pairs * share * 4e-10


def _experts(num_tokens: int) -> float:
    """The share of the experts that so many tokens need; half as many as if they chose by lot."""
    return 1.0 - (1.0 - 8 / 128) ** (num_tokens / 2)


def _prefill(plan: StepPlan) -> tuple[int, float, float]:
    lo, hi = plan.span or (0, NUM_LAYERS)
    pairs = sum(len(row.token_ids) * (row.start + len(row.token_ids) / 2) for row in plan.prefill)
    return plan.num_prefill_tokens, (hi - lo) / NUM_LAYERS if plan.prefill else 0.0, pairs


@dataclasses.dataclass
class Served:
    """One request: its length and the times of its tokens, in seconds."""

    arrival: float
    prompt_len: int
    times: list[float] = dataclasses.field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.arrival

    @property
    def tbts(self) -> list[float]:
        return [b - a for a, b in zip(self.times[:-1], self.times[1:], strict=True)]


Load = list[tuple[float, int, int]]  # (arrival, prompt tokens, answer tokens)


def poisson(rate: float, seconds: float, lengths: Callable[[random.Random], tuple[int, int]], seed: int = 0) -> Load:
    rng, now, load = random.Random(seed), 0.0, []
    while (now := now + rng.expovariate(rate)) < seconds:
        load.append((now, *lengths(rng)))
    return load


def serve(
    load: Load,
    step_s: Callable[[StepPlan], float],
    *,
    budget: int = 8192,
    first_token_within: Callable[[int], float | None] = lambda prompt_len: None,
    **options,
) -> list[Served]:
    """Runs `load` to its end, as a server with these options of the scheduler does.

    Args:
        first_token_within: seconds from arrival to a deadline, by the prompt's length; such answers have one token.
    """
    config = SchedulerConfig(
        max_num_seqs=256,
        max_num_batched_tokens=budget,
        max_model_len=33_000,
        padded_decode_rows=(0, 16, 64, 256) if budget >= 512 else (),
        **options,
    )
    prefill = prefill_policy(config, NUM_LAYERS, lambda num_tokens, num_seqs, spans: num_tokens)
    scheduler = Scheduler(config, PagePool(40_000, 64), enable_prefix_caching=False, prefill=prefill)
    served = [Served(arrival, prompt_len) for arrival, prompt_len, _ in load]
    now, num_added = 0.0, 0
    while num_added < len(load) or scheduler.has_unfinished():
        if not scheduler.has_unfinished():
            now = max(now, load[num_added][0])
        while num_added < len(load) and load[num_added][0] <= now:
            arrival, prompt_len, answer_len = load[num_added]
            within = first_token_within(prompt_len)
            scheduler.add(
                Request(
                    request_id=num_added,
                    prompt_token_ids=[2] * prompt_len,
                    max_tokens=1 if within else answer_len,
                    arrival_time=arrival,
                    deadline=arrival + within if within else None,
                )
            )
            num_added += 1
        plan = scheduler.schedule(now)
        if plan is None:
            assert scheduler.expired(), "nothing to do, but not at the end"
            continue
        seconds = step_s(plan)
        now += seconds
        tokens = [[3] for _ in plan.decode] + [[3] if row.samples else [] for row in plan.prefill]
        for request, new, *_ in scheduler.commit(plan, StepResult(token_ids=tokens), now):
            served[request.request_id].times += [now] * len(new)
        scheduler.observe(plan, seconds)
    return served
