"""Synthetic requests and their arrival times: pure functions of a random generator."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticRequest:
    """A prompt of random token ids and the number of tokens to answer with."""

    prompt_token_ids: list[int]
    output_len: int


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
