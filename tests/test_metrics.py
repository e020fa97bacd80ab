"""Step records and counters, without an engine."""

import pytest

from jaxserve.metrics import ITERATION_TOKENS, NUM_STEP_RECORDS, EngineMetrics, StepRecorder
from jaxserve.scheduler import DecodeRow, PrefillRow, SchedulerStats, StepPlan

STATS = SchedulerStats(
    num_requests_running=3,
    num_requests_waiting=2,
    kv_cache_usage_perc=0.25,
    num_preemptions=0,
    prefix_cache_queries=0,
    prefix_cache_hits=0,
)


def plan(step: int, decode: int = 1, prefill: tuple[int, ...] = (), span=None) -> StepPlan:
    rows = [PrefillRow(None, 0, i, 0, [7] * tokens, True) for i, tokens in enumerate(prefill)]  # pyright: ignore
    decodes = [DecodeRow(None, 0, i) for i in range(decode)]  # pyright: ignore
    return StepPlan(step=step, decode=decodes, prefill=rows, new_slots=[], page_updates=[], span=span)


def record(recorder: StepRecorder, plan: StepPlan, start: float, end: float):
    recorder.start(start)
    recorder.end(plan, STATS, num_new_tokens=4, expert_bytes=300, now=end)
    return recorder.recent()[-1]


def test_a_record_says_what_the_plan_and_the_scheduler_held():
    found = record(StepRecorder(num_layers=12), plan(1, decode=2, prefill=(5, 6), span=(4, 8)), 10.0, 10.5)
    assert found._asdict() == {
        "step": 1,
        "start_time": 10.0,
        "duration_s": 0.5,
        "num_decode_rows": 2,
        "num_prefill_rows": 2,
        "num_prefill_tokens": 11,
        "layer_lo": 4,
        "layer_hi": 8,
        "num_new_tokens": 4,
        "num_requests_running": 3,
        "num_requests_waiting": 2,
        "kv_cache_usage": 0.25,
        "expert_bytes": 300,
    }


@pytest.mark.parametrize(("prefill", "span"), [((3,), (0, 12)), ((), (0, 0))])
def test_no_span_is_all_layers_where_there_is_prefill_and_none_elsewhere(prefill, span):
    found = record(StepRecorder(num_layers=12), plan(1, prefill=prefill), 1.0, 2.0)
    assert (found.layer_lo, found.layer_hi) == span


def test_overlapped_steps_follow_each_other():
    recorder = StepRecorder(num_layers=1)
    recorder.start(1.0)
    recorder.start(1.2)  # planned while the first runs
    recorder.end(plan(1), STATS, num_new_tokens=1, expert_bytes=0, now=2.0)
    recorder.end(plan(2), STATS, num_new_tokens=1, expert_bytes=0, now=2.5)
    record(recorder, plan(3), 9.0, 9.5)  # after a rest
    assert [(r.start_time, r.end_time) for r in recorder.recent()] == [(1.0, 2.0), (2.0, 2.5), (9.0, 9.5)]


def test_the_last_records_are_kept_and_found_by_number():
    recorder = StepRecorder(num_layers=1)
    assert recorder.recent() == recorder.recent(5) == []
    last = NUM_STEP_RECORDS + 10
    for step in range(1, last + 1):
        record(recorder, plan(step), step, step + 0.5)
    assert [r.step for r in recorder.recent()] == list(range(11, last + 1))
    assert [r.step for r in recorder.recent(last - 2)] == [last - 1, last]
    assert recorder.recent(last) == recorder.recent(last + 7) == []
    assert len(recorder.recent(-3)) == NUM_STEP_RECORDS


def test_steps_are_counted_by_their_tokens_cumulatively():
    metrics = EngineMetrics()
    for tokens in (1, 2, 8, 9, ITERATION_TOKENS[-1] + 1):
        metrics.count_step(tokens, 10)
    values = metrics.as_dict()
    buckets = {key.split('"')[1]: value for key, value in values.items() if "_bucket" in key}
    assert [buckets[bound] for bound in ("1", "8", "16", "16384", "+Inf")] == [1, 3, 4, 4, 5]
    assert (values["jaxserve:num_steps"], values["jaxserve:expert_bytes"]) == (5, 50)
    assert values["jaxserve:iteration_tokens"] == 20 + ITERATION_TOKENS[-1] + 1
