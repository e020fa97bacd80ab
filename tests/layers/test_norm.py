import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.norm import rms_norm


def definition(x, w, eps, offset=0.0):
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * (offset + w)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(3, 16), (2, 3, 16)])
def test_rms_norm_is_its_definition(shape, offset):
    x, w = 5 * jax.random.normal(jax.random.key(0), shape), jax.random.normal(jax.random.key(1), (16,))
    y = rms_norm(x, w, 1e-5, offset=offset)
    np.testing.assert_allclose(y, definition(x, w, 1e-5, offset), rtol=1e-5)
    assert not np.allclose(y, definition(x, w, 1e-5, 1 - offset), rtol=1e-5)
    assert not np.allclose(y, definition(x - x.mean(-1, keepdims=True), w, 1e-5, offset), rtol=1e-5)


def test_epsilon_counts_where_the_input_is_small():
    x, w = jnp.full((1, 4), 1e-3), jnp.ones(4)
    np.testing.assert_allclose(rms_norm(x, w, 1e-6), np.full((1, 4), 2**-0.5), rtol=1e-5)


def test_bfloat16_is_rounded_only_at_the_end():
    x = jax.random.normal(jax.random.key(0), (64, 256), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), (256,), jnp.bfloat16)
    y = rms_norm(x, w, 1e-6)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(y, np.float64), definition(x, w, 1e-6), rtol=2**-8)
