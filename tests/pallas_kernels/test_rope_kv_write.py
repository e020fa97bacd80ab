import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.kv_cache import write_kv
from jaxserve.layers.rope import apply_rope
from jaxserve.pallas_kernels.paged_attention import KVCache
from jaxserve.pallas_kernels.paged_attention.types import FP8
from jaxserve.pallas_kernels.rope_kv_write import for_heads, mosaic_gpu, reference, rope_kv_write, unsupported

LAYER = 1
# T, N, K, H: heads four, two and one at a time, and more rows than are in work at once
SHAPES = [(5, 8, 4, 64), (3, 4, 2, 128), (7, 4, 1, 256), (6, 16, 8, 64)]

interpreted = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="before jax 0.12 the interpreter of Mosaic GPU kernels is not reliable"
)


def inputs(shape, dtype, kv_dtype=None):
    T, N, K, H = shape
    rng = np.random.default_rng(T)
    k, v = (jnp.asarray(rng.standard_normal((2, T + 2, 8, K, H)), kv_dtype or dtype) for _ in range(2))
    heads = jnp.asarray(rng.standard_normal((T, N + 2 * K, H)), dtype)
    angles = jnp.asarray(rng.uniform(0.0, 1000.0, (T, H // 2)), jnp.float32)
    pages = jnp.asarray(rng.permutation(T + 2)[:T], jnp.int32)
    kv = KVCache(k=k, v=v)
    if kv_dtype == FP8:  # heads whose values are far apart, some of them out of range
        k_scale, v_scale = jnp.asarray(4.0 ** rng.integers(-6, 3, (2, 2, K)), jnp.float32)
        kv = dataclasses.replace(kv, k_scale=k_scale, v_scale=1.25 * v_scale)
    return heads, angles, kv, pages, jnp.asarray(rng.integers(0, 8, T), jnp.int32)


def rotation(angles, kv):
    return for_heads((jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]), kv)


def errors(got, expected, dtype) -> list[float]:
    """The largest error of queries, keys and values, in units of one rounding of the largest value."""
    q, kv = got
    bounds = [float(jnp.finfo(dtype).eps) * np.abs(each).max() for each in expected]
    pairs = zip((q, kv.k, kv.v), expected, bounds, strict=True)
    return [float(np.abs(np.asarray(a, np.float32) - b).max() / bound) for a, b, bound in pairs]


@interpreted
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_queries_turn_and_keys_and_values_land_in_their_pages(shape, dtype, monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "MAX_BLOCKS", 4)
    heads, angles, kv, pages, offsets = inputs(shape, dtype)
    expected = reference.rope_kv_write(heads, angles, kv, LAYER, pages, offsets)
    got = rope_kv_write(heads, rotation(angles, kv), kv, jnp.int32(LAYER), pages, offsets, interpret=True)
    assert max(errors(got, expected, dtype)) < 1


def written_by_xla(heads, angles, kv, pages, offsets) -> tuple[jax.Array, KVCache]:
    K, turn = kv.k.shape[3], (jnp.cos(angles)[:, None], jnp.sin(angles)[:, None])
    q, k, v = jnp.split(heads, [heads.shape[1] - 2 * K, heads.shape[1] - K], axis=1)
    q, k = (apply_rope(x, turn) for x in (q, k))
    return q, write_kv(kv, LAYER, k, v, pages, offsets)


@interpreted
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_in_float8_the_kernel_writes_what_xla_writes(shape, monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "MAX_BLOCKS", 4)
    heads, angles, kv, pages, offsets = inputs(shape, jnp.bfloat16, FP8)
    got_q, got = rope_kv_write(heads, rotation(angles, kv), kv, jnp.int32(LAYER), pages, offsets, interpret=True)
    q, expected = written_by_xla(heads, angles, kv, pages, offsets)
    np.testing.assert_allclose(np.asarray(got_q, np.float32), np.asarray(q, np.float32), rtol=0.01, atol=0.01)
    np.testing.assert_array_equal(np.asarray(got.v, np.float32), np.asarray(expected.v, np.float32))
    k, expected_k = np.asarray(got.k, np.float32), np.asarray(expected.k, np.float32)
    assert (k != expected_k).mean() < 0.01  # the rotation may have been rounded to another neighbour
    np.testing.assert_allclose(k, expected_k, rtol=0.126, atol=2**-9)
    for scale, same in zip((got.k_scale, got.v_scale), (kv.k_scale, kv.v_scale), strict=True):
        np.testing.assert_array_equal(scale, same)


@pytest.mark.parametrize("of", ["k_scale", "v_scale"])
@pytest.mark.parametrize("wrong", ["right", "another head's", "another layer's", "its inverse"])
def test_what_is_written_in_float8_is_within_a_rounding_of_the_definition(of, wrong):
    heads, angles, kv, pages, offsets = inputs(SHAPES[0], jnp.bfloat16, FP8)
    scale = getattr(kv, of)
    others = {"another head's": jnp.roll(scale, 1, axis=1), "another layer's": scale[::-1], "its inverse": 1 / scale}
    _, *expected = reference.rope_kv_write(heads, angles, kv, LAYER, pages, offsets)
    _, got = written_by_xla(heads, angles, dataclasses.replace(kv, **{of: others.get(wrong, scale)}), pages, offsets)
    near = [
        np.allclose(np.asarray(ours, np.float32), theirs, rtol=0.07, atol=0.02)
        for ours, theirs in zip((got.k, got.v), expected, strict=True)
    ]
    assert near == [wrong == "right" or of == "v_scale", wrong == "right" or of == "k_scale"]
    assert max(np.abs(each).max() for each in expected) == 448


@interpreted
@pytest.mark.parametrize(
    "wrong",
    ["no rotation", "turns the other way", "neighbours' angles", "another layer", "another page", "next offset"],
)
def test_a_plausible_wrong_answer_is_out_of_bounds(wrong):
    heads, angles, kv, pages, offsets = inputs(SHAPES[0], jnp.bfloat16)
    expected = reference.rope_kv_write(heads, angles, kv, LAYER, pages, offsets)
    layer = 0 if wrong == "another layer" else LAYER
    angles = {"no rotation": 0 * angles, "turns the other way": -angles, "neighbours' angles": angles[::-1]}.get(
        wrong, angles
    )
    pages = pages[::-1] if wrong == "another page" else pages
    offsets = (offsets + 1) % 8 if wrong == "next offset" else offsets
    got = rope_kv_write(heads, rotation(angles, kv), kv, jnp.int32(layer), pages, offsets, interpret=True)
    assert max(errors(got, expected, jnp.bfloat16)) > 1


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((2, 8, 4, 64), jnp.float32, "both be bfloat16 or both float16, got float32 and float32"),
        ((2, 9, 3, 64), jnp.bfloat16, "3 heads at a time of 64 dimensions"),
        ((2, 7, 1, 128), jnp.bfloat16, "1 heads at a time of 128 dimensions"),
    ],
)
def test_what_it_cannot_serve_it_says(shape, dtype, reason):
    heads, _, kv, *_ = inputs(shape, dtype)
    assert reason in (unsupported(heads, kv) or "")
    for kv_dtype in (jnp.bfloat16, FP8):
        heads, _, kv, *_ = inputs(SHAPES[0], jnp.bfloat16, kv_dtype)
        assert unsupported(heads, kv) is None
