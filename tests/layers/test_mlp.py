import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.mlp import gate, mlp

ACTS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}


@pytest.mark.parametrize("act", ACTS)
def test_the_first_half_is_activated_and_gates_the_second(act):
    x = 3 * jax.random.normal(jax.random.key(0), (5, 12))
    g, u = np.split(np.asarray(x, np.float64), 2, axis=-1)
    np.testing.assert_allclose(gate(x, act), ACTS[act](g) * u, rtol=1e-4, atol=1e-6)
    assert not np.allclose(gate(x, act), ACTS[act](u) * g, rtol=1e-4, atol=1e-6)
    other = next(name for name in ACTS if name != act)
    assert not np.allclose(gate(x, act), ACTS[other](g) * u, rtol=1e-4, atol=1e-6)


def test_mlp_is_down_of_gated_up():
    kx, kg, kd = jax.random.split(jax.random.key(0), 3)
    x, gate_up, down = (jax.random.normal(k, s) for k, s in ((kx, (3, 8)), (kg, (12, 8)), (kd, (8, 6))))
    inner = np.asarray(x, np.float64) @ np.asarray(gate_up, np.float64).T
    expected = (ACTS["silu"](inner[:, :6]) * inner[:, 6:]) @ np.asarray(down, np.float64).T
    np.testing.assert_allclose(mlp(x, gate_up, down, act="silu"), expected, rtol=1e-4, atol=1e-4)
    assert mlp(x.astype(jnp.bfloat16), gate_up.astype(jnp.bfloat16), down, act="silu").dtype == jnp.bfloat16
