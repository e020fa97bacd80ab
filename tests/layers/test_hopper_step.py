"""A decode step through the Hopper kernels, interpreted, beside the same step in plain XLA."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from steps import GEMMA, LLAMA, page_table, rows_and_cache, step

from jaxserve.layers.kv_cache import init_kv_cache
from jaxserve.layers.sparse import Quest, SparseAttention
from jaxserve.layers.sparse.state import init_state
from jaxserve.models import get_model
from jaxserve.pallas_kernels.paged_attention import mosaic_gpu
from jaxserve.pallas_kernels.paged_attention.types import FP8

SIZES = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 2}
PROMPTS = [[3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 32], [2, 7, 18, 28]]

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="before jax 0.12 the interpreter of Mosaic GPU kernels is not reliable"
)


@pytest.mark.parametrize(
    ("hf", "kv_dtype"),
    [
        pytest.param(LLAMA | SIZES, jnp.bfloat16, id="one_kind"),
        pytest.param(GEMMA | SIZES, jnp.bfloat16, id="two_kinds"),
        pytest.param(LLAMA | SIZES, FP8, id="fp8", marks=pytest.mark.full),
    ],
)
def test_the_kernels_give_what_xla_gives(hf, kv_dtype, monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "num_multiprocessors", lambda: 2)
    monkeypatch.setattr("steps.PAGE_SIZE", 8)
    model = get_model(hf)
    params = model.init(jax.random.key(0), jnp.bfloat16)
    kv = init_kv_cache(model.config, num_pages=33, page_size=8, dtype=kv_dtype)
    kv = {
        kind: dataclasses.replace(each, k=jnp.full_like(each.k, jnp.nan), v=jnp.full_like(each.v, jnp.nan))
        for kind, each in kv.items()
    }
    table = page_table(2)
    run = rows_and_cache(model, params)
    _, kv = run(kv, step([], [(0, prompt) for prompt in PROMPTS], table), implementation="xla")
    decodes = step([(1, len(PROMPTS[0])), (2, len(PROMPTS[1]))], [], table)
    expected, expected_kv = run(kv, decodes, implementation="xla")
    with plgpu.force_gpu_interpret_mode():
        got, got_kv = run(kv, decodes, implementation="mosaic_gpu")
    tolerance = {"rtol": 0.05, "atol": 0.05}  # a few roundings to bfloat16 a layer; the outputs are of size 1
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(expected, np.float32), **tolerance)
    rounding = {"rtol": 0.13, "atol": 0.05} if kv_dtype == FP8 else tolerance  # to a neighbour in float8
    for kind in kv:
        for ours, theirs in ((got_kv[kind].k, expected_kv[kind].k), (got_kv[kind].v, expected_kv[kind].v)):
            np.testing.assert_allclose(np.asarray(ours, np.float32), np.asarray(theirs, np.float32), **rounding)
    late, _ = run(kv, step([(1, 9), (2, 3)], [], table), implementation="xla")
    assert not np.allclose(np.asarray(late, np.float32), np.asarray(expected, np.float32), **tolerance)


@pytest.mark.full
def test_under_a_policy_the_kernels_give_what_xla_gives(monkeypatch):
    """Heads select different pages."""
    monkeypatch.setattr(mosaic_gpu, "num_multiprocessors", lambda: 2)
    monkeypatch.setattr("steps.PAGE_SIZE", 8)
    sparse = SparseAttention(decode=Quest(budget=16, layers=(0, None)))
    model = dataclasses.replace(get_model(LLAMA | SIZES), sparse=sparse)
    params = model.init(jax.random.key(0), jnp.bfloat16)
    empty = init_kv_cache(model.config, num_pages=33, page_size=8, dtype=jnp.bfloat16)
    kv = {kind: init_state(sparse, each, 64, num_slots=4, max_pages=8) for kind, each in empty.items()}
    prompts = [list(range(3, 40)), [2, 7, 18, 28]]
    table = page_table(2)
    run = rows_and_cache(model, params)
    _, kv = run(kv, step([], [(0, prompt) for prompt in prompts], table), implementation="xla")
    decodes = step([(1, len(prompts[0])), (2, len(prompts[1]))], [], table)
    expected, _ = run(kv, decodes, implementation="xla")
    with plgpu.force_gpu_interpret_mode():
        got, _ = run(kv, decodes, implementation="mosaic_gpu")
    tolerance = {"rtol": 0.05, "atol": 0.05}
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(expected, np.float32), **tolerance)
    dense, _ = rows_and_cache(dataclasses.replace(model, sparse=None), params)(kv, decodes, implementation="xla")
    assert not np.allclose(np.asarray(dense, np.float32), np.asarray(expected, np.float32), **tolerance)
