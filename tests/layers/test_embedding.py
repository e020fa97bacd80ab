import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.layers.embedding import embed, soft_cap, unembed

TABLE = jax.random.normal(jax.random.key(0), (7, 4))


def test_embed_takes_rows_and_scales_them():
    ids = jnp.asarray([3, 0, 6])
    np.testing.assert_array_equal(embed(ids, TABLE), TABLE[np.asarray(ids)])
    np.testing.assert_allclose(embed(ids, TABLE, 2.5), 2.5 * TABLE[np.asarray(ids)])


def test_the_scale_is_rounded_to_the_tables_dtype_first():
    table = jnp.ones((2, 3), jnp.bfloat16)
    scaled = embed(jnp.asarray([1]), table, 2304**0.5 + 0.1)
    assert scaled.dtype == jnp.bfloat16
    np.testing.assert_array_equal(scaled, jnp.full((1, 3), 48.1, jnp.bfloat16))


def test_logits_are_float32_and_capped_on_request():
    x = 9 * jax.random.normal(jax.random.key(1), (2, 4), jnp.bfloat16)
    table = TABLE.astype(jnp.bfloat16)
    exact = np.asarray(x, np.float64) @ np.asarray(table, np.float64).T
    logits = unembed(x, table)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, exact, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(unembed(x, table, 5.0), 5 * np.tanh(exact / 5), rtol=1e-4, atol=1e-4)
    assert np.abs(logits).max() > 6


def test_no_cap_is_the_identity():
    x = jnp.asarray([1e6, -3.0])
    np.testing.assert_array_equal(soft_cap(x, None), x)
