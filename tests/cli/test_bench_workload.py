import numpy as np
import pytest

from jaxserve.cli.bench.workload import DATASETS, arrival_times, dataset_requests, random_requests


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_gaps_have_the_asked_rate_and_burstiness(burstiness, variation):
    gaps = np.diff(arrival_times(20_000, 5.0, burstiness, rng()), prepend=0.0)
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)


def test_an_infinite_rate_sends_everything_at_once():
    assert arrival_times(3, float("inf"), 1.0, rng()) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("rate", "burstiness", "name"), [(0.0, 1.0, "request_rate"), (1.0, 0.0, "burstiness"), (1.0, np.inf, "burstiness")]
)
def test_impossible_arrivals_are_refused(rate, burstiness, name):
    with pytest.raises(ValueError, match=f"{name} must be"):
        arrival_times(1, rate, burstiness, rng())


def make(**changes):
    options = {"input_len": 20, "output_len": 10, "token_ids": range(100, 200), "rng": rng()}
    return random_requests(50, **(options | changes))


def test_lengths_are_exact_without_a_range():
    assert {(len(r.prompt_token_ids), r.output_len) for r in make()} == {(20, 10)}


def test_lengths_stay_in_their_range_and_reach_its_ends():
    requests = make(range_ratio=0.5)
    assert {len(r.prompt_token_ids) for r in requests} <= set(range(10, 31))
    output_lens = [r.output_len for r in requests]
    assert (min(output_lens), max(output_lens)) == (5, 15)


def test_only_the_prefix_is_shared():
    first, second = make(prefix_len=8)[:2]
    assert first.prompt_token_ids[:8] == second.prompt_token_ids[:8]
    assert first.prompt_token_ids[8:] != second.prompt_token_ids[8:]
    assert len(first.prompt_token_ids) == 28


def test_prompts_use_only_the_given_tokens_and_repeat_with_the_seed():
    assert all(100 <= token < 200 for r in make() for token in r.prompt_token_ids)
    assert make() == make()
    assert make() != make(rng=np.random.default_rng(8))


@pytest.mark.parametrize(
    ("option", "value"), [("input_len", 0), ("output_len", 0), ("prefix_len", -1), ("range_ratio", 1.0)]
)
def test_impossible_lengths_are_refused(option, value):
    with pytest.raises(ValueError, match=f"{option} must be .*, got {value}"):
        make(**{option: value})


def close(found: np.ndarray, percents: dict[float, float], mean: float) -> bool:
    at = {percent: np.percentile(found, percent) for percent in percents}
    return found.mean() == pytest.approx(mean, rel=0.08) and at == pytest.approx(percents, rel=0.06)


@pytest.mark.parametrize(
    ("name", "prompt", "output"),
    [
        ("sharegpt-like", ({50: 1730, 90: 5696}, 2340), ({50: 415, 90: 834}, 439)),
        ("arxiv-like", ({50: 9194 * np.exp(-0.125)}, 9194), ({}, 230)),
        (
            "azure-code-like",
            ({10: 147, 50: 1469, 90: 5194, 99: 7436}, 2048),
            ({10: 7, 50: 13, 90: 55, 99: 252}, 27.9),
        ),
        (
            "azure-conv-like",
            ({10: 207, 50: 1020, 90: 2735, 99: 4142}, 1155),
            ({10: 54, 50: 129, 90: 424, 99: 601}, 211),
        ),
    ],
)
def test_lengths_are_those_of_the_dataset(name, prompt, output):
    for lengths, (percents, mean) in zip(DATASETS[name], (prompt, output), strict=True):
        assert close(lengths.draw(100_000, rng()), percents, mean)
        assert not close(1.2 * lengths.draw(100_000, rng()), percents, mean)


def test_requests_of_a_dataset_fit_the_model():
    found = dataset_requests("arxiv-like", 200, max_model_len=4096, token_ids=range(100, 200), rng=rng())
    assert max(len(each.prompt_token_ids) + each.output_len for each in found) == 4096
    assert all(100 <= token < 200 for each in found for token in each.prompt_token_ids)
    assert found[0] != found[1]
