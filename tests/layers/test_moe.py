import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu, tpu as pltpu

from jaxserve.layers.mlp import mlp
from jaxserve.layers.moe import block_rows, moe as moe_and_count, route
from jaxserve.pallas_kernels import fallback, paged_attention
from jaxserve.pallas_kernels.grouped_matmul import mosaic_gpu

E, D, F = 8, 32, 16


def moe(*args, **options):
    return moe_and_count(*args, **options)[0]


def weights(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    router, gate_up, down = (
        jax.random.normal(k, s, dtype) / s[-1] ** 0.5
        for k, s in zip(keys, ((E, D), (E, 2 * F, D), (E, D, F)), strict=True)
    )
    return 4 * router, gate_up, down


def definition(x, router, gate_up, down, top_k, normalize, chosen=None):
    """Every token alone, over the experts that have its largest probabilities."""
    out = np.zeros(x.shape)
    probs = np.asarray(jax.nn.softmax(x @ router.T, axis=-1), np.float64)
    for t in range(x.shape[0]):
        best = np.argsort(-probs[t])[:top_k] if chosen is None else chosen[t]
        share = probs[t, best] / (probs[t, best].sum() if normalize else 1.0)
        for w, e in zip(share, best, strict=True):
            out[t] += w * np.asarray(mlp(x[t : t + 1], gate_up[e], down[e], act="silu")[0], np.float64)
    return out


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (1, 3), (2, 3), (5, 8), (40, 2), (300, 3)])
def test_each_token_passes_its_own_experts(tokens, top_k, normalize):
    x = jax.random.normal(jax.random.key(tokens), (tokens, D))
    args = weights()
    got = jax.jit(lambda x: moe(x, *args, top_k=top_k, normalize=normalize, act="silu"))(x)
    expected = definition(x, *args, top_k, normalize)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_the_bound_above_refuses_other_experts_and_other_shares():
    x = jax.random.normal(jax.random.key(0), (5, D))
    args = weights()
    expected = definition(x, *args, 3, True)
    assert np.abs(expected - definition(x, *args, 3, False)).max() > 1e-3
    _, experts = route(x, args[0], 3, normalize=True)
    neighbours = (np.asarray(experts) + 1) % E
    assert np.abs(expected - definition(x, *args, 3, True, neighbours)).max() > 1e-3


def test_all_tokens_at_one_expert_take_several_blocks():
    _, gate_up, down = weights()
    router = jnp.zeros((E, D)).at[5].set(1.0)
    x = jnp.abs(jax.random.normal(jax.random.key(0), (50, D)))
    assert block_rows(50, E) < 50
    got = moe(x, router, gate_up, down, top_k=1, normalize=True, act="silu")
    np.testing.assert_allclose(got, mlp(x, gate_up[5], down[5], act="silu"), atol=1e-5)


def test_experts_without_rows_are_not_read():
    router, gate_up, down = weights()
    x = jax.random.normal(jax.random.key(3), (2, D))
    _, experts = route(x, router, 2, normalize=True)
    unused = np.setdiff1d(np.arange(E), np.asarray(experts))
    poisoned = (gate_up.at[unused].set(jnp.nan), down.at[unused].set(jnp.nan))
    got, num_experts = moe_and_count(x, router, *poisoned, top_k=2, normalize=True, act="silu")
    assert num_experts == E - unused.size
    np.testing.assert_array_equal(got, moe(x, router, gate_up, down, top_k=2, normalize=True, act="silu"))


def test_padding_picks_no_expert_and_changes_no_real_row():
    router, gate_up, down = weights()
    x = jax.random.normal(jax.random.key(3), (6, D))
    real = np.array([True, False, True, False, False, False])
    how = {"top_k": 2, "normalize": True, "act": "silu", "real": jnp.asarray(real)}
    _, experts = route(x, router, 2, normalize=True)
    unused = np.setdiff1d(np.arange(E), np.asarray(experts)[real])
    assert np.intersect1d(unused, np.asarray(experts)[~real]).size
    poisoned = (gate_up.at[unused].set(jnp.nan), down.at[unused].set(jnp.nan))
    got, num_experts = moe_and_count(x, router, *poisoned, **how)
    assert num_experts == E - unused.size
    assert not got[~real].any()
    np.testing.assert_allclose(got[real], definition(x[real], router, gate_up, down, 2, True), atol=1e-5)
    for value in (0.0, 7.0, jnp.inf, jnp.nan):
        other = moe(jnp.where(real[:, None], x, value), router, *poisoned, **how)
        np.testing.assert_array_equal(other, got)


def test_padding_alone_reads_no_weights():
    router, gate_up, down = weights()
    x = jax.random.normal(jax.random.key(3), (4, D))
    nothing = (jnp.full_like(gate_up, jnp.nan), jnp.full_like(down, jnp.nan))
    assert not moe(x, router, *nothing, top_k=2, normalize=True, act="silu", real=jnp.zeros(4, bool)).any()


def test_bfloat16_stays_close_and_keeps_its_dtype():
    args = weights(jnp.bfloat16)
    x = jax.random.normal(jax.random.key(0), (9, D), jnp.bfloat16)
    got = moe(x, *args, top_k=2, normalize=True, act="silu")
    assert got.dtype == jnp.bfloat16
    wide = moe(x.astype(jnp.float32), *(w.astype(jnp.float32) for w in args), top_k=2, normalize=True, act="silu")
    np.testing.assert_allclose(np.asarray(got, np.float32), wide, atol=2**-8 * F**0.5 * float(jnp.abs(wide).max()))


def test_stacks_of_all_layers_and_an_index_are_taken_as_well():
    x = jax.random.normal(jax.random.key(0), (5, D))
    router, gate_up, down = weights()
    stacks = [jnp.stack([jnp.full_like(w, jnp.nan), w]) for w in (gate_up, down)]
    how = {"top_k": 3, "normalize": True, "act": "silu"}
    got = jax.jit(lambda layer: moe(x, router, *stacks, layer=layer, **how))(jnp.int32(1))
    np.testing.assert_allclose(got, moe(x, router, gate_up, down, **how), atol=1e-6)


@pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="before jax 0.12 the interpreter of Mosaic GPU kernels is not reliable"
)
@pytest.mark.parametrize("stacked", [True, pytest.param(False, marks=pytest.mark.full)])
def test_on_hopper_the_kernels_give_the_same(stacked, monkeypatch):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((9, 128), (4, 128), (2, 4, 128, 128), (2, 4, 128, 64))
    x, router, gate_up, down = (
        jax.random.normal(k, s, jnp.bfloat16) / s[-1] ** 0.5 for k, s in zip(keys, shapes, strict=True)
    )
    stacks, layer = ((gate_up, down), 1) if stacked else ((gate_up[1], down[1]), None)
    how = {"top_k": 2, "normalize": False, "act": "silu", "real": jnp.arange(9) < 7}
    monkeypatch.setattr(mosaic_gpu, "num_multiprocessors", lambda: 3)
    with plgpu.force_gpu_interpret_mode():
        got = moe(x, 9 * router, *stacks, layer=layer, **how, implementation="mosaic_gpu")
    monkeypatch.setattr(paged_attention, "preferred", lambda: "mosaic_gpu")
    expected = moe(x, 9 * router, *stacks, layer=layer, **how, implementation="xla")  # kernels would need the mode
    assert got.dtype == jnp.bfloat16
    scale = float(jnp.abs(expected).max())
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(expected, np.float32), atol=scale / 50)


def test_on_tpu_the_kernels_give_the_same(monkeypatch):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((9, 256), (4, 256), (2, 4, 256, 256), (2, 4, 256, 128))
    x, router, gate_up, down = (
        jax.random.normal(k, s, jnp.bfloat16) / s[-1] ** 0.5 for k, s in zip(keys, shapes, strict=True)
    )
    how = {"layer": 1, "top_k": 2, "normalize": False, "act": "silu", "real": jnp.arange(9) < 7}
    monkeypatch.setattr(paged_attention, "preferred", lambda: "mosaic_tpu")
    with pltpu.force_tpu_interpret_mode():
        got, num_read = moe_and_count(x, 9 * router, gate_up, down, **how)
    expected, num_picked = moe_and_count(x, 9 * router, gate_up, down, **how, implementation="xla")
    assert got.dtype == jnp.bfloat16
    assert num_read == num_picked
    scale = float(jnp.abs(expected).max())
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(expected, np.float32), atol=scale / 50)


@pytest.mark.parametrize("kernels", ["mosaic_gpu", "mosaic_tpu"])
def test_what_the_kernels_cannot_do_falls_back_with_one_line(kernels, monkeypatch, caplog):
    monkeypatch.setattr(paged_attention, "preferred", lambda: kernels)
    fallback.say_once.cache_clear()
    x = jax.random.normal(jax.random.key(0), (5, D))
    args = weights()
    with caplog.at_level(logging.WARNING, fallback.__name__):
        got = [moe(x, *args, top_k=3, normalize=True, act="silu") for _ in range(2)]
    (line,) = [record.getMessage() for record in caplog.records if record.name == fallback.__name__]
    assert "mixture of experts falls back" in line
    assert "got float32" in line
    np.testing.assert_allclose(got[1], definition(x, *args, 3, True), atol=1e-5)
