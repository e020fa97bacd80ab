import dataclasses
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from steps import GEMMA, LLAMA, make, page_table, rows_and_cache, step

from jaxserve.layers import kv_cache
from jaxserve.layers.kv_cache import init_kv_cache, position_shape, write_kv
from jaxserve.models import get_model
from jaxserve.pallas_kernels.paged_attention.types import FP8


def test_each_kind_has_the_layers_of_its_own():
    for hf, expected in ((LLAMA, {"full": 5}), (GEMMA, {"sliding": 3, "full": 2})):
        config = get_model(hf).config
        kv = init_kv_cache(config, num_pages=5, page_size=4, dtype=jnp.bfloat16)
        assert {kind: cache.k.shape for kind, cache in kv.items()} == {
            kind: (n, 5, 4, 2, 8) for kind, n in expected.items()
        }
        assert all(cache.k.dtype == cache.v.dtype == jnp.bfloat16 and cache.page_size == 4 for cache in kv.values())


def test_rows_go_to_their_page_and_offset_of_one_layer_and_nowhere_else():
    kv = init_kv_cache(get_model(LLAMA).config, num_pages=5, page_size=4, dtype=jnp.bfloat16)
    k, v = jax.random.normal(jax.random.key(0), (2, 3, 2, 8))
    pages, offsets = np.asarray([4, 1, 4]), np.asarray([0, 3, 2])
    written = write_kv(kv["full"], 2, k, v, jnp.asarray(pages), jnp.asarray(offsets))
    for cache, rows in ((written.k, k), (written.v, v)):
        np.testing.assert_array_equal(cache[2, pages, offsets], rows.astype(jnp.bfloat16))
        assert np.count_nonzero(np.asarray(cache, np.float32)) == rows.size


SCALES = jnp.asarray([[1.0, 1.0], [1.0, 1.0], [0.5, 3.0], [1.0, 1.0], [1.0, 1.0]])  # [L, K]


def written_in_fp8(k, v, *, k_scale=SCALES, v_scale=2 * SCALES) -> list[np.ndarray]:
    """What the pages hold after one row of keys and values `[K, H]` went to layer 2, float8 [K, H] each."""
    kv = init_kv_cache(get_model(LLAMA).config, num_pages=5, page_size=4, dtype=FP8)["full"]
    kv = dataclasses.replace(kv, k_scale=k_scale, v_scale=v_scale)
    place = jnp.asarray([3])
    kv = jax.jit(write_kv)(kv, jnp.int32(2), k[None], v[None], place, place)
    assert np.isfinite(np.asarray(kv.k, np.float32)).all()
    return [np.asarray(cache)[2, 3, 3] for cache in (kv.k, kv.v)]


def test_an_fp8_cache_has_scales_of_one_until_it_is_given_others():
    kv = init_kv_cache(get_model(GEMMA).config, num_pages=5, page_size=4, dtype=FP8)
    for kind, num_layers in {"sliding": 3, "full": 2}.items():
        assert kv[kind].k.dtype == kv[kind].v.dtype == FP8
        for scale in (kv[kind].k_scale, kv[kind].v_scale):
            np.testing.assert_array_equal(scale, np.ones((num_layers, 2), np.float32))
    kv = init_kv_cache(get_model(LLAMA).config, num_pages=5, page_size=4, dtype=jnp.bfloat16)["full"]
    assert kv.k_scale is kv.v_scale is None


def test_what_is_written_in_fp8_is_divided_by_its_heads_scale_and_rounded_to_the_nearest():
    k, v = (x.astype(jnp.bfloat16) for x in 5 * jax.random.normal(jax.random.key(0), (2, 2, 8)))
    for got, x, scale in zip(written_in_fp8(k, v), (k, v), (SCALES[2], 2 * SCALES[2]), strict=True):
        wide = np.asarray(x, np.float32) / np.asarray(scale)[:, None]
        np.testing.assert_array_equal(got, wide.astype(ml_dtypes.float8_e4m3fn))
        all_values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        nearest = np.nanmin(np.abs(all_values - wide[..., None]), axis=-1)
        np.testing.assert_array_equal(np.abs(got.astype(np.float32) - wide), nearest)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_what_fp8_cannot_hold_is_written_as_the_largest(dtype):
    far = jnp.asarray([[449.0, 480.0, 1e4, jnp.inf, -465.0, -3e38, 447.0, 0.0]] * 2, dtype)
    got, _ = written_in_fp8(far, far, k_scale=jnp.ones((5, 2)), v_scale=jnp.ones((5, 2)))
    np.testing.assert_array_equal(got.astype(np.float32), [[448, 448, 448, 448, -448, -448, 448, 0]] * 2)


def test_a_step_over_an_fp8_cache_is_near_one_over_a_wide_cache_and_scales_are_used_for_both_ways():
    model, params, wide = make(LLAMA)
    run = rows_and_cache(model, params)
    fp8 = init_kv_cache(model.config, num_pages=33, page_size=4, dtype=FP8)["full"]
    fp8 = dataclasses.replace(fp8, k=jnp.full_like(fp8.k, jnp.nan), v=jnp.full_like(fp8.v, jnp.nan))
    some, table = 0.25 * (1 + jnp.arange(10.0).reshape(5, 2)), page_table(2)
    prefill = step([], [(0, [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 32]), (0, [2, 7, 18, 28])], table)
    decode = step([(1, 11), (2, 4)], [], table)

    def hidden(kv):
        _, kv = run(kv, prefill)
        return np.asarray(run(kv, decode)[0])

    def distance(kv):
        return np.abs(hidden({"full": kv}) - expected).max()

    expected = hidden(wide)
    ones, others = fp8, dataclasses.replace(fp8, k_scale=some, v_scale=some[::-1])
    bound = 0.1 * np.abs(expected).max()
    assert 0 < distance(ones) < bound
    assert 0 < distance(others) < bound
    far = dataclasses.replace(fp8, v_scale=jnp.full_like(some, 1e-4))  # values beyond 448 scales saturate
    assert distance(far) > bound
    assert np.isfinite(hidden({"full": far})).all()


@pytest.mark.parametrize(
    ("heads", "dtype", "expected"),
    [
        ((8, 128), "bfloat16", (8, 128)),
        ((2, 128), "bfloat16", (2, 128)),
        ((2, 128), "float8_e4m3fn", (4, 128)),
        ((3, 64), "bfloat16", (2, 128)),
        ((5, 128), "bfloat16", (8, 128)),
        ((3, 256), "bfloat16", (8, 128)),
        ((4, 80), "bfloat16", (4, 80)),
    ],
)
def test_positions_on_a_tpu_fill_rows_that_its_memory_does_not_pad(heads, dtype, expected):
    assert position_shape(*heads, dtype, "tpu") == expected
    assert position_shape(*heads, dtype, "gpu") == heads


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 3, 64), (6, 3, 128), (4, 4, 64)])
def test_rows_do_not_depend_on_how_a_tpu_lays_out_its_cache(heads, kv_heads, head_dim, monkeypatch):
    hf = LLAMA | {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    table = page_table(2)
    batch = step([], [(0, [3, 1, 4, 1, 5]), (0, [9, 2])], table), step([(6, 5)], [(2, [8])], table)
    model, params, usual = make(hf)
    monkeypatch.setattr(kv_cache, "target_device", lambda: types.SimpleNamespace(platform="tpu"))
    on_tpu = make(hf)[2]
    assert on_tpu["full"].k.shape != usual["full"].k.shape
    run = rows_and_cache(model, params)
    for b in batch:
        expected, usual = run(usual, b)
        got, on_tpu = run(on_tpu, b)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
