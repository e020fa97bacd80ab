import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.layers.linear import fan_in, linear, param, zeros


@pytest.mark.parametrize("rows", [1, 2, 33])
def test_a_product_of_bfloat16_is_summed_in_float32_and_rounded_once(rows):
    kx, kw = jax.random.split(jax.random.key(0))
    x = jax.random.normal(kx, (rows, 512), jnp.bfloat16)
    w = jax.random.normal(kw, (64, 512), jnp.bfloat16)
    bias = jnp.arange(64, dtype=jnp.bfloat16)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T + np.asarray(bias, np.float64)
    y = linear(x, w, bias)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=2**-8, atol=1e-3)
    wide = linear(x, w, bias, out_dtype=jnp.float32)
    assert wide.dtype == jnp.float32
    np.testing.assert_allclose(wide, exact, rtol=1e-4, atol=1e-3)


def test_the_bound_above_refuses_a_product_without_bias_or_with_the_weight_the_other_way_round():
    x, w = jax.random.normal(jax.random.key(0), (2, 3, 8))
    bias = jnp.ones(3)
    assert np.abs(linear(x, w, bias) - linear(x, w)).min() > 0.5
    assert not np.allclose(linear(x, w), x @ w.T[:, ::-1], rtol=2**-8, atol=1e-3)


def test_fan_in_keeps_the_scale_of_what_passes():
    w = fan_in(jax.random.key(1), (700, 400), jnp.float32)
    x = jax.random.normal(jax.random.key(2), (50, 400))
    assert abs(float(w.mean())) < 2e-4
    assert 0.95 < float(linear(x, w).std()) < 1.05
    assert len(np.unique(np.asarray(w))) > 0.99 * w.size


def test_fan_in_depends_on_the_key_and_on_nothing_else():
    a, again = (fan_in(jax.random.key(1), (8, 8), jnp.float32) for _ in range(2))
    other = fan_in(jax.random.key(2), (8, 8), jnp.float32)
    np.testing.assert_array_equal(a, again)
    assert not np.isclose(a, other).any()


def test_a_parameter_carries_its_logical_axes():
    leaf = param(zeros, (4, 2), ("mlp", "embed"), rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    assert (leaf.get_value().shape, leaf.get_value().dtype) == ((4, 2), jnp.bfloat16)
    assert leaf.axes == ("mlp", "embed")
