"""Layered prefill in the engine: the tokens of whole prompts, whatever the groups, the order and whoever leaves."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import re
import shlex
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import jaxserve
from jaxserve import EngineDeadError, SamplingParams, cli, engine_core
from jaxserve.config import EngineConfig
from jaxserve.programs import Programs
from jaxserve.scheduler import LayeredPrefill, layered
from jaxserve.scheduler.step_time import StepWork
from jaxserve.step_programs import StepShape

COMMON = [5 + j % 7 for j in range(17)]
PROMPTS = [
    [7 + i + j % 11 for j in range(length)] if i % 3 else COMMON + [9 + i + j % 5 for j in range(length)]
    for i, length in enumerate((40, 3, 21, 9, 50, 1))
]


def greedy(num_tokens=12, **options):
    """The likeliest token each time; with top_k rather than temperature, so that n may be 2."""
    return SamplingParams(top_k=1, max_tokens=num_tokens, ignore_eos=True, **options)


def tokens_of(output):
    return [sample.token_ids for sample in output.outputs]


class Passes:
    """Counts how often each token of a prompt passed each layer, from the plans that the runner gets."""

    def __init__(self, core):
        self.num_layers = core.runner.num_layers
        self.counts = collections.defaultdict(collections.Counter)  # (request, epoch) -> (position, layer) -> times
        self.seen = collections.Counter()
        self._cohort = None
        dispatch = core.runner.dispatch

        def counting(plan):
            self._count(plan)
            return dispatch(plan)

        core.runner.dispatch = counting

    def _count(self, plan):
        lo, hi = plan.span or (0, self.num_layers)
        for row in plan.prefill:
            counted = self.counts[row.request, row.epoch]
            for position in range(row.start, row.start + len(row.token_ids)):
                counted.update((position, layer) for layer in range(lo, hi))
            assert row.samples <= plan.completes
        self.seen["spans"] += plan.span is not None
        self.seen["overtakes"] += lo == 0 and self._cohort is not None
        if plan.prefill:
            self._cohort = None if plan.completes else plan.cohort

    def check(self, request):
        """Of a request that ended by itself: exactly once, since it last got a slot."""
        passed = self.counts[request, max(epoch for one, epoch in self.counts if one is request)]
        known = range(request.num_prompt_tokens)
        first = min(position for position, _ in passed)
        assert set(passed) >= {(p, layer) for p in known[first:] for layer in range(self.num_layers)}
        assert set(passed.values()) == {1}


@pytest.fixture(scope="module")
def whole(make_llm):
    """An engine that computes prompts whole."""
    return make_llm(max_num_batched_tokens=64, max_num_seqs=1)


@pytest.fixture(scope="module")
def expected(whole):
    """The tokens of each prompt alone."""
    return [tokens_of(whole.generate([prompt], greedy(), use_tqdm=False)[0])[0] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def small(make_llm):
    """An engine with room for few prompts at once, and the count of what passes its layers."""
    sizes = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "num_pages": 18}  # few programs, cuts, and pre-emption
    llm = make_llm(prefill="layered", scheduling_policy="priority", max_model_len=96, **sizes)
    return llm, Passes(llm.llm_engine.core)


arrivals = st.lists(
    st.tuples(
        st.integers(0, 12), st.integers(0, len(PROMPTS) - 1), st.sampled_from([0, 0, 1]), st.sampled_from([1, 2])
    ),
    min_size=1,
    max_size=7,
)
aborts = st.lists(st.tuples(st.integers(1, 16), st.integers(0, 6)), max_size=2)


@given(
    arrivals=arrivals,
    aborts=aborts,
    tokens_of_a_group=st.sampled_from([2, 4, 8]),
    order=st.sampled_from(["fcfs", "shortest", "slack"]),
)
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_any_schedule_gives_the_tokens_of_whole_prompts(
    expected, small, arrivals, aborts, tokens_of_a_group, order, monkeypatch
):
    llm, passes = small
    engine, core = llm.llm_engine, llm.llm_engine.core
    config = dataclasses.replace(core.scheduler.config, prefill_order=order)
    core.scheduler._prefill = LayeredPrefill(config, core.runner.num_layers, core.runner.span_rows)
    monkeypatch.setattr(layered, "TOKENS_OF_A_GROUP", tokens_of_a_group)
    core.reset_prefix_cache()
    found, gone, requests, step = {}, set(), {}, 0
    while step <= 16 or engine.has_unfinished_requests():
        for i, (when, prompt, priority, n) in enumerate(arrivals):
            if when == step:
                deadline = 1000.0 - i if i % 2 else None
                engine.add_request(str(i), PROMPTS[prompt], greedy(n=n), priority=priority, deadline=deadline)
                requests |= core._requests
        for when, i in aborts:
            if when == step:
                engine.abort_request(str(i))
                gone.add(str(i))
        found |= {output.request_id: output for output in engine.step() if output.finished}
        step += 1
    engine.settle()
    assert core.scheduler.pool.num_held == 0
    assert set(found) >= {str(i) for i in range(len(arrivals))} - gone
    for i, (_, prompt, _, n) in enumerate(arrivals):
        if str(i) not in gone:
            assert tokens_of(found[str(i)]) == [expected[prompt]] * n
    for request in requests.values():
        if request.finish_reason == "length":
            passes.check(request)


def test_the_schedules_were_what_they_should_be(small):
    llm, passes = small
    assert passes.seen["spans"] > 50
    assert passes.seen["overtakes"] > 10
    assert llm.get_metrics()["jaxserve:num_preemptions"] > 10


def test_who_leaves_between_two_groups_leaves_the_others_where_they_stand(expected, small, monkeypatch):
    monkeypatch.setattr(layered, "TOKENS_OF_A_GROUP", 1)
    llm, _ = small
    engine = llm.llm_engine
    decoding(engine)
    since = llm.recent_steps()[-1].step
    engine.add_request("leaves", PROMPTS[1], greedy())
    engine.add_request("stays", PROMPTS[4], greedy())
    engine.step()
    engine.abort_request("leaves")
    found = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output for output in engine.step() if output.finished}
    assert [step.num_prefill_rows for step in llm.recent_steps(since) if step.num_prefill_rows][:3] == [2, 1, 1]
    assert tokens_of(found["stays"]) == [expected[4]]


def test_prompt_logprobs_come_with_the_last_group(whole, small, monkeypatch):
    params = greedy(2, prompt_logprobs=0)
    expected = whole.generate(PROMPTS[1:3], params)
    monkeypatch.setattr(layered, "TOKENS_OF_A_GROUP", 2)
    llm, _ = small
    decoding(llm.llm_engine)
    found = llm.generate(PROMPTS[1:3], params)
    assert any(step.layer_hi < 3 for step in llm.recent_steps()[-40:] if step.num_prefill_tokens)
    for one, other in zip(found, expected, strict=True):
        assert one.prompt_logprobs[0] is other.prompt_logprobs[0] is None
        for mine, theirs in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert {k: v.logprob for k, v in mine.items()} == pytest.approx(
                {k: v.logprob for k, v in theirs.items()}, abs=1e-3
            )


def test_programs_that_are_not_ready_come_in_the_background_and_nobody_waits(small):
    runner = small[0].llm_engine.core.runner
    gate, forward = threading.Event(), runner.device.forward

    def build(key, compiled):
        assert gate.wait(10)
        return lambda: key

    runner.device.forward = table = Programs("forward", build, runner.device.compiler, None)
    runner._warm_up_jobs = [concurrent.futures.Future()]  # there was a warm-up
    try:
        assert runner.span_rows(9, 2, [(0, 2), (2, 3)]) is None
        gate.set()
        shape = StepShape(decode_rows=4, prefill_tokens=16, prefill_seqs=2)
        keys = [dataclasses.replace(shape, span=span, completes=span[1] == 3) for span in [(0, 2), (2, 3)]]
        for job in table.request(keys):
            job.result(10)
        assert runner.span_rows(9, 2, [(0, 2), (2, 3)]) == 16
        assert table.get(dataclasses.replace(keys[0], decode_rows=0))[0] == keys[0]  # stands in
        assert table.num_stalls == 0
    finally:
        runner.device.forward, runner._warm_up_jobs = forward, []


def test_only_decode_rows_sample_before_the_last_group():
    shape = StepShape(decode_rows=16, prefill_tokens=256, prefill_seqs=32, span=(0, 2), completes=False)
    assert (shape.sample_rows, dataclasses.replace(shape, completes=True).sample_rows) == (16, 64)
    assert dataclasses.replace(shape, decode_rows=0).sample_rows == 1


def test_a_program_of_a_span_stands_in_only_for_one_with_a_frontier_of_its_rows():
    shape = StepShape(decode_rows=8, prefill_tokens=32, prefill_seqs=4, span=(1, 2))
    assert shape.covers(dataclasses.replace(shape, decode_rows=2))
    assert not shape.covers(dataclasses.replace(shape, prefill_tokens=16, prefill_seqs=2))
    assert not shape.covers(dataclasses.replace(shape, span=(0, 2)))
    assert not shape.covers(dataclasses.replace(shape, span=None))


def test_on_cpu_there_are_only_so_many_programs_of_spans(small, monkeypatch):
    runner = small[0].llm_engine.core.runner
    monkeypatch.setattr(runner, "_max_spans", len(runner._spans))
    assert runner.span_rows(9, 1, [(0, 3)]) is None


def test_steps_are_timed_and_spans_compiled_before_the_first_request(expected, small):
    llm, _ = small
    core = llm.llm_engine.core
    policy = LayeredPrefill(core.scheduler.config, core.runner.num_layers, core.runner.span_rows)
    assert policy.step_time.seconds(StepWork(4, 0, 16, 64.0, 1.0)) is None
    engine_core._warm_up_layered(policy, core.runner, block=True)
    one, two = (policy.step_time.seconds(StepWork(4, 0, tokens, 64.0, 1.0)) for tokens in (1, 16))
    assert 0.0 < one <= two < 10.0
    assert tokens_of(llm.generate([PROMPTS[2]], greedy())[0]) == [expected[2]]  # the slots are as they were


PAGE = (Path(__file__).parents[2] / "docs" / "layered_prefill.md").read_text(encoding="utf-8")


def test_the_example_of_the_documentation_runs(small, monkeypatch, capsys):
    llm, _ = small
    monkeypatch.setattr(layered, "TOKENS_OF_A_GROUP", 4)
    monkeypatch.setattr(jaxserve, "LLM", lambda *_, **options: contextlib.nullcontext(llm))
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(compile(example.replace("The sea is wide. ", "a"), "layered_prefill.md", "exec"), {})
    assert "(1, 2)" in capsys.readouterr().out


@pytest.mark.parametrize("line", re.findall(r"^jaxserve .*", PAGE, flags=re.MULTILINE))
def test_the_commands_of_the_documentation_reach_the_engine(line, monkeypatch, capsys):
    def start(options):
        assert EngineConfig.of(**options).scheduler.prefill in ("auto", "layered")
        raise EngineDeadError("as far as the engine")

    monkeypatch.setattr("jaxserve.cli.engine.start", start)
    monkeypatch.setattr("jaxserve.cli.engine.start_async", start)
    assert (
        cli.run(
            [*shlex.split(line)[1:], *(["--port", "0"] if " serve --model" in line and "bench" not in line else [])]
        )
        == 1
    )
    assert capsys.readouterr().err.splitlines()[-1] == "error: as far as the engine"


def decoding(engine):
    """A request that decodes, so that there is something to protect."""
    engine.add_request("decodes", [3, 4], greedy(60))
    for _ in range(3):
        engine.step()
