"""Synthetic requests and their arrival times: pure functions of a random generator."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticRequest:
    """A prompt of random token ids and the number of tokens to answer with."""

    prompt_token_ids: list[int]
    output_len: int


class Lengths(Protocol):
    """A distribution of numbers of tokens."""

    def draw(self, num: int, rng: np.random.Generator) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class Quantiles:
    """Through these (share of all, tokens), geometric between them."""

    points: tuple[tuple[float, float], ...]

    def draw(self, num: int, rng: np.random.Generator) -> np.ndarray:
        shares, tokens = zip(*self.points, strict=True)
        return np.exp(np.interp(rng.random(num), shares, np.log(tokens)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogNormal:
    """The tokens' logarithm has the standard deviation `sigma`; what would be longer than `most` is `most`."""

    mean: float
    sigma: float
    most: float = math.inf

    def draw(self, num: int, rng: np.random.Generator) -> np.ndarray:
        drawn = rng.lognormal(math.log(self.mean) - self.sigma**2 / 2, self.sigma, num)
        return np.minimum(drawn, self.most)


class Dataset(NamedTuple):
    """Lengths that are drawn apart: in the traces that these are modelled on, hardly anything connects them."""

    prompt: Lengths
    output: Lengths


# Lengths alone; contents are random tokens. ShareGPT and arXiv summarisation as in the paper of layered prefill
# (arXiv 2510.08055). Azure: percentiles of the public LLM inference traces of 2023 (Microsoft, CC-BY 4.0), from
# Splitwise, arXiv 2311.18677. Points at 0, 0.75, 0.999 and 1 that no source gives are fitted to the means.
DATASETS: Mapping[str, Dataset] = {
    "sharegpt-like": Dataset(
        Quantiles(((0, 20), (0.1, 200), (0.5, 1730), (0.9, 5696), (1, 8900))),
        Quantiles(((0, 10), (0.1, 100), (0.5, 415), (0.9, 834), (1, 1360))),
    ),
    "arxiv-like": Dataset(LogNormal(mean=9194, sigma=0.5, most=32_768), LogNormal(mean=230, sigma=0.3)),
    "azure-code-like": Dataset(
        Quantiles(((0, 10), (0.1, 147), (0.5, 1469), (0.9, 5194), (0.99, 7436), (1, 7437))),
        Quantiles(((0, 1), (0.1, 7), (0.5, 13), (0.75, 20), (0.9, 55), (0.99, 252), (0.999, 600), (1, 1899))),
    ),
    "azure-conv-like": Dataset(
        Quantiles(((0, 20), (0.1, 207), (0.5, 1020), (0.75, 1250), (0.9, 2735), (0.99, 4142), (1, 14_050))),
        Quantiles(((0, 5), (0.1, 54), (0.5, 129), (0.75, 360), (0.9, 424), (0.99, 601), (1, 1000))),
    ),
}


def dataset_requests(
    name: str, num: int, *, max_model_len: int, token_ids: Sequence[int], rng: np.random.Generator
) -> list[SyntheticRequest]:
    """`num` requests with the lengths of one of DATASETS, cut where they are too long for the model.

    Raises:
        ValueError: no request.
    """
    if num < 1:
        raise ValueError(f"num_prompts must be at least 1, got {num}")
    prompts, outputs = (np.maximum(1, lengths.draw(num, rng)).astype(int) for lengths in DATASETS[name])
    outputs = np.minimum(outputs, max_model_len - 1)
    prompts = np.minimum(prompts, max_model_len - outputs)
    choices = np.asarray(token_ids)
    return [
        SyntheticRequest(prompt_token_ids=rng.choice(choices, prompt).tolist(), output_len=int(output))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def arrival_times(num: int, request_rate: float, burstiness: float, rng: np.random.Generator) -> list[float]:
    """Seconds from the start at which each of `num` requests arrives, in order; the first comes after one gap.

    Gaps are gamma distributed with mean 1 / request_rate and shape `burstiness`: 1 is a Poisson process, less is
    burstier (coefficient of variation = burstiness ** -0.5). An infinite rate sends all at 0.

    Raises:
        ValueError: no request, or a rate or burstiness that is not above 0.
    """
    if num < 1:
        raise ValueError(f"num_prompts must be at least 1, got {num}")
    if not request_rate > 0:
        raise ValueError(f"request_rate must be above 0 (inf sends all requests at once), got {request_rate}")
    if not 0 < burstiness < math.inf:
        raise ValueError(f"burstiness must be a finite number above 0, got {burstiness}")
    if math.isinf(request_rate):
        return [0.0] * num
    gaps = rng.gamma(shape=burstiness, scale=1.0 / (request_rate * burstiness), size=num)
    return np.cumsum(gaps).tolist()


def random_requests(
    num: int,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    token_ids: Sequence[int],
    rng: np.random.Generator,
) -> list[SyntheticRequest]:
    """`num` prompts of ids drawn evenly from `token_ids`.

    Lengths are drawn evenly from `[len * (1 - range_ratio), len * (1 + range_ratio)]` and are at least 1; every prompt
    starts with the same `prefix_len` tokens, which come on top of `input_len`.

    Raises:
        ValueError: a length below 1, a negative prefix or a ratio outside [0, 1).
    """
    for name, value in (("num_prompts", num), ("input_len", input_len), ("output_len", output_len)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if prefix_len < 0:
        raise ValueError(f"prefix_len must be at least 0, got {prefix_len}")
    if not 0.0 <= range_ratio < 1.0:
        raise ValueError(f"range_ratio must be in [0, 1), got {range_ratio}")
    choices = np.asarray(token_ids)
    prefix = rng.choice(choices, prefix_len).tolist()
    input_lens = _lengths(num, input_len, range_ratio, rng)
    output_lens = _lengths(num, output_len, range_ratio, rng)
    return [
        SyntheticRequest(prompt_token_ids=prefix + rng.choice(choices, length).tolist(), output_len=out)
        for length, out in zip(input_lens, output_lens, strict=True)
    ]


def _lengths(num: int, mean: int, ratio: float, rng: np.random.Generator) -> list[int]:
    low, high = max(1, math.floor(mean * (1 - ratio))), math.ceil(mean * (1 + ratio))
    return rng.integers(low, high, size=num, endpoint=True).tolist()
