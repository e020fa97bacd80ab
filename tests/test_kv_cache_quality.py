import json
import math

import jax.numpy as jnp
import pytest

from benchmarks import kv_cache_quality
from benchmarks._logprobs import mean_kl


@pytest.mark.full
def test_a_float8_cache_costs_the_demo_model_little_and_not_nothing(capsys):
    kv_cache_quality.main()
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["name"] == "paged_fp8_kv_kl"
    assert row["met"]
    assert row["value"] > 1e-3


def test_the_divergence_is_that_of_the_other_from_the_truth():
    truth = jnp.log(jnp.asarray([[0.5, 0.5], [0.9, 0.1]]))
    other = jnp.log(jnp.asarray([[0.25, 0.75], [0.9, 0.1]]))
    expected = (0.5 * math.log(2) + 0.5 * math.log(2 / 3)) / 2
    assert mean_kl(truth, other) == pytest.approx(expected, rel=1e-5)
    assert mean_kl(other, truth) != pytest.approx(mean_kl(truth, other), rel=0.01)
