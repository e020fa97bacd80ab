import json

import pytest

from jaxserve.cli.bench import sweep


def point(rate: float, attainment: float) -> sweep.Point:
    times = {"mean_ttft_ms": 10 * rate, "p99_ttft_ms": 20 * rate, "mean_itl_ms": 1.0, "p99_itl_ms": rate}
    return sweep.Point(request_rate=rate, goodput_attainment=attainment, request_throughput=rate, **times)


@pytest.mark.parametrize("first", [0.01, 1.0, 6.9, 7.1, 300.0])
def test_the_highest_rate_is_found_from_both_sides(first):
    tried = []

    def measure(rate: float) -> sweep.Point:
        tried.append(rate)
        return point(rate, 0.95 if rate <= 7.0 else 0.85)

    points = sweep.sweep(measure, first)
    assert 7.0 / sweep.PRECISION <= sweep.highest_rate(points) <= 7.0
    assert [each.request_rate for each in points] == sorted(tried)
    assert len(tried) == len(set(tried)) < 20


@pytest.mark.parametrize(("attainment", "highest"), [(1.0, 2.0**sweep.MOST_STEPS), (0.0, 0.0)])
def test_where_nothing_is_too_much_or_everything_it_ends(attainment, highest):
    points = sweep.sweep(lambda rate: point(rate, attainment), 1.0)
    assert len(points) == sweep.MOST_STEPS + 1
    assert sweep.highest_rate(points) == highest


def test_a_good_rate_above_a_bad_one_does_not_count():
    points = [point(1.0, 0.95), point(2.0, 0.8), point(4.0, 0.99)]
    assert sweep.highest_rate(points) == 1.0


OPTIONS = (
    "bench",
    "serve",
    "--model",
    "m",
    "--num-prompts",
    "4",
    "--random-input-len",
    "6",
    "--random-output-len",
    "3",
)


def test_the_command_reports_the_rate_and_draws_the_front(run, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "MOST_STEPS", 2)
    picture = tmp_path / "front.png"
    how = ("--request-rate", "500", "--sweep-rate", "--goodput", "ttft:10000", "--plot", str(picture))
    code, out, _, llm = run(*OPTIONS, *how, "--json")
    result = json.loads(out)
    assert code == 0
    assert llm.llm_engine.num_resets == 3  # no run finds its prompts in the prefix cache
    assert result["max_request_rate"] == 2000
    assert [each["request_rate"] for each in result["sweep"]] == [500, 1000, 2000]
    assert picture.read_bytes().startswith(b"\x89PNG")
    code, out, _, _ = run(*OPTIONS, *how)
    assert code == 0
    assert "max_request_rate" in out
    assert "goodput_attain" in out


@pytest.mark.parametrize("how", [("--request-rate", "1"), ("--goodput", "ttft:5")])
def test_a_sweep_needs_limits_and_a_rate_to_begin_with(run, how):
    code, _, err, llm = run(*OPTIONS, "--sweep-rate", *how)
    assert code == 2
    assert "--sweep-rate needs --goodput, and a --request-rate to begin with" in err
    assert llm is None


def test_a_dataset_that_there_is_not_stops_before_the_model_loads(run):
    for command in ("serve", "throughput"):
        code, _, err, llm = run("bench", command, "--model", "m", "--dataset-name", "sharegpt")
        assert code == 2
        assert "--dataset-name must be one of random, sharegpt-like" in err
        assert llm is None


def test_a_dataset_gives_the_lengths(run):
    options = ("--dataset-name", "azure-code-like", "--num-prompts", "20", "--json")
    code, out, _, _ = run("bench", "serve", "--model", "m", *options)
    result = json.loads(out)
    assert code == 0
    assert result["completed"] == 20
    assert result["total_input_tokens"] > 10 * result["total_output_tokens"]
