import math

import numpy as np
import pytest

from jaxserve.cli.bench import metrics
from jaxserve.cli.bench.metrics import RequestRecord

# Arrives at 1.0, then tokens at 1.5, 1.6, 1.6, 2.0: TTFT 0.5 s, E2EL 1.0 s, TPOT 0.5 / 3 s.
RECORD = RequestRecord(prompt_len=10, arrival_s=1.0, token_times_s=(1.5, 1.6, 1.6, 2.0))
SINGLE = RequestRecord(prompt_len=5, arrival_s=0.0, token_times_s=(0.25,))
FAILED = RequestRecord(prompt_len=7, arrival_s=0.0, failed=True)


def test_one_request_has_the_times_of_its_definition():
    assert RECORD.ttft_s == pytest.approx(0.5)
    assert RECORD.e2el_s == pytest.approx(1.0)
    assert RECORD.tpot_s == pytest.approx(0.5 / 3)
    assert RECORD.itls_s == pytest.approx([0.1, 0.0, 0.4])


def test_a_single_token_has_no_time_per_output_token():
    assert SINGLE.tpot_s == 0.0
    assert metrics.samples_ms([SINGLE, RECORD])["tpot"] == pytest.approx([500 / 3])


def test_percentiles_are_numpys():
    values = np.random.default_rng(0).exponential(size=37).tolist()
    for percent in (0, 1, 50, 90, 99, 100):
        assert metrics.percentile(values, percent) == pytest.approx(np.percentile(values, percent))
    assert math.isnan(metrics.percentile([], 50))


def test_the_summary_counts_and_divides_by_the_duration():
    result = metrics.summary([RECORD, SINGLE, FAILED], 4.0)
    assert (result["completed"], result["failed"]) == (2, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (15, 5)
    assert result["request_throughput"] == 0.5
    assert result["output_throughput"] == 1.25
    assert result["total_token_throughput"] == 5.0
    assert result["max_output_tokens_per_s"] == 3
    assert result["mean_ttft_ms"] == pytest.approx(375.0)
    assert result["median_ttft_ms"] == pytest.approx(375.0)
    assert result["std_ttft_ms"] == pytest.approx(125.0)
    assert result["p99_ttft_ms"] == pytest.approx(250 + 0.99 * 250)
    assert "request_goodput" not in result


def test_percentiles_are_named_after_their_percent():
    result = metrics.summary([RECORD], 1.0, percents=(50, 99.9))
    assert {"p50_itl_ms", "p99.9_itl_ms"} <= set(result)


def test_goodput_needs_every_limit_and_counts_failures_against_it():
    limits = {"ttft": 600.0, "e2el": 1000.1}
    assert metrics.meets(RECORD, limits)
    assert not metrics.meets(RECORD, limits | {"tpot": 100.0})
    result = metrics.summary([RECORD, SINGLE, FAILED], 4.0, goodput_ms={"ttft": 300.0})
    assert result["request_goodput"] == 0.25
    assert result["goodput_attainment"] == pytest.approx(1 / 3)


def test_requests_are_concurrent_only_while_both_run():
    def record(start: float, end: float) -> RequestRecord:
        return RequestRecord(prompt_len=1, arrival_s=start, token_times_s=(end,))

    assert metrics.max_concurrent([record(0, 1), record(1, 2)]) == 1
    assert metrics.max_concurrent([record(0, 3), record(1, 2), record(1.5, 4)]) == 3
    assert metrics.max_concurrent([]) == 0


def test_goodput_limits_are_read():
    assert metrics.parse_goodput(["ttft:200", "tpot:50.5"]) == {"ttft": 200.0, "tpot": 50.5}


@pytest.mark.parametrize("bad", [["itl:3"], ["ttft"], ["ttft:x"], ["ttft:0"], ["ttft:inf"], ["ttft:1", "ttft:2"]])
def test_a_bad_goodput_limit_is_named(bad):
    with pytest.raises(ValueError, match=f"goodput must be NAME:MS.*got '{bad[-1]}'"):
        metrics.parse_goodput(bad)
