"""Decode attention with a page table for each KV head against the definition.

Where there is no GPU, the kernel runs in Pallas' interpreter; see `test_paged_attention`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import LAYER, LAYERS

from jaxserve.pallas_kernels.paged_attention import (
    AttentionBatch,
    KVCache,
    decode_work,
    mosaic_gpu,
    mosaic_gpu_plan,
    paged_attention,
    prepare,
    reference,
)
from jaxserve.pallas_kernels.paged_attention.types import FP8

ON_GPU = jax.devices()[0].platform == "gpu"
LENGTHS = ((70, 0, 3), (0, 0, 0), (1, 300, 64), (65, 16, 0), (0, 0, 0))  # of sequences; heads beyond these repeat them


@dataclasses.dataclass(frozen=True)
class Case:
    N: int
    K: int
    H: int = 64
    page_size: int = 16
    soft_cap: float | None = None
    kv_lens: tuple[tuple[int, ...], ...] = LENGTHS

    @property
    def options(self) -> dict:
        return {"scale": self.H**-0.5, "soft_cap": self.soft_cap}


CASES = {
    "groups_of_one": Case(8, 8),
    "groups_of_three": Case(9, 3, page_size=64),
    "groups_of_four": Case(8, 2, page_size=64),
    "groups_of_four_32_8_128": Case(32, 8, H=128, page_size=64),
    "groups_of_eight": Case(16, 2, soft_cap=2.0),
    "head_dim_256": Case(8, 4, H=256, page_size=64),
    "page_128": Case(8, 2, page_size=128),
    "many_short": Case(8, 2, kv_lens=((3, 1), (1, 5), (9, 0)) * 5),
    "empty": Case(8, 2, kv_lens=((0, 0),) * 3),
}


def inputs(case: Case, dtype, kv_dtype=None) -> tuple[jax.Array, KVCache, AttentionBatch]:
    """Each KV head reads random pages of its own; all that none of its tables names is NaN, for this head alone."""
    rng = np.random.default_rng(case.N)
    kv_lens = np.array([[lens[k % len(lens)] for k in range(case.K)] for lens in case.kv_lens])
    max_pages = -(-kv_lens.max() // case.page_size) + 2
    num_pages = 1 + len(kv_lens) * max_pages
    table = np.stack([1 + rng.permutation(num_pages - 1) for _ in range(case.K)])
    table = table.reshape(case.K, len(kv_lens), max_pages).swapaxes(0, 1)
    used = np.zeros((num_pages, case.page_size, case.K), bool)
    for (s, k), n in np.ndenumerate(kv_lens):
        positions = np.arange(n)
        used[table[s, k, positions // case.page_size], positions % case.page_size, k] = True
        table[s, k, -(-n // case.page_size) :] = 2**30
    k, v = rng.standard_normal((2, LAYERS, num_pages, case.page_size, case.K, case.H), np.float32)
    k[:, ~used], v[:, ~used] = np.nan, np.nan
    k[1 - LAYER], v[1 - LAYER] = np.nan, np.nan
    kv = KVCache(k=jnp.asarray(k, kv_dtype or dtype), v=jnp.asarray(v, kv_dtype or dtype))
    if kv_dtype == FP8:
        k_scale, v_scale = jnp.asarray(0.4 * 2.0 ** rng.integers(0, 3, (2, LAYERS, case.K)), jnp.float32)
        kv = dataclasses.replace(kv, k_scale=k_scale, v_scale=v_scale)
    q = jnp.asarray(2.0 * rng.standard_normal((len(kv_lens), case.N, case.H)), dtype)
    return q, kv, AttentionBatch(page_table=jnp.asarray(table, jnp.int32), kv_lens=jnp.asarray(kv_lens, jnp.int32))


def run(q, kv, batch, options, implementation):
    options = {"sliding_window": None} | options
    if implementation == "mosaic_gpu" and not ON_GPU:
        attend = functools.partial(mosaic_gpu.paged_attention, **options, interpret=True)
    else:
        attend = functools.partial(paged_attention, **options, return_lse=True, implementation=implementation)
        attend = jax.jit(attend)
    out, lse = attend(q, kv, jnp.int32(LAYER), batch)
    return np.asarray(out, np.float32), np.asarray(lse)


def error(got, expected, batch, dtype) -> float:
    """The largest error of a head in units of its bound: see `attention_cases`."""
    group = got.shape[1] // batch.kv_lens.shape[1]
    lens = np.repeat(np.asarray(batch.kv_lens), group, axis=1)
    bound = float(jnp.finfo(dtype).eps) * np.sqrt(lens + got.shape[-1]) * np.abs(expected).max()
    return float((np.abs(got - expected).max(axis=2) / np.maximum(bound, 1e-30)).max())


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch):
    """Three interpreted multiprocessors: sequences are split over workers, and a worker has several of them."""
    if not ON_GPU:
        monkeypatch.setattr(mosaic_gpu, "num_multiprocessors", lambda: 3)


need_interpreter = pytest.mark.skipif(
    not ON_GPU and jax.__version_info__ < (0, 12), reason="before jax 0.12 the interpreter loses wgmma accumulators"
)
FAST = {("groups_of_three", None), ("groups_of_four", FP8)}


def all_cases():
    for name in CASES:
        yield pytest.param("xla", name, jnp.float32, None, id=f"xla-{name}-f32")
        for kv_dtype in (None, FP8):
            marks = [] if ON_GPU or (name, kv_dtype) in FAST else [pytest.mark.full]
            label = f"mosaic_gpu-{name}-{'fp8' if kv_dtype else 'bf16'}"
            yield pytest.param("mosaic_gpu", name, jnp.bfloat16, kv_dtype, id=label, marks=[need_interpreter, *marks])


@pytest.mark.parametrize(("implementation", "name", "dtype", "kv_dtype"), [*all_cases()])
def test_each_kv_head_reads_its_own_pages_and_nothing_else(implementation, name, dtype, kv_dtype):
    case = CASES[name]
    q, kv, batch = inputs(case, dtype, kv_dtype)
    with jax.default_matmul_precision("highest"):
        expected, expected_lse = reference.paged_attention(q, kv, LAYER, batch, **case.options)
        out, lse = run(q, kv, batch, case.options, implementation)
    assert error(out, expected, batch, dtype) < 1
    seen = np.isfinite(expected_lse)
    np.testing.assert_array_equal(np.isneginf(lse), ~seen)
    assert (out[~seen] == 0).all()
    tolerance = 4 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(lse[seen], expected_lse[seen], rtol=tolerance, atol=4 * tolerance)


def rolled(array, axis):
    return jnp.roll(array, 1, axis=axis)


WRONG = {
    "another_head's_table": lambda q, kv, b: (q, kv, dataclasses.replace(b, page_table=rolled(b.page_table, 1))),
    "another_head's_length": lambda q, kv, b: (q, kv, dataclasses.replace(b, kv_lens=rolled(b.kv_lens, 1))),
    "another_sequence's_table": lambda q, kv, b: (q, kv, dataclasses.replace(b, page_table=rolled(b.page_table, 0))),
    "another_head's_keys": lambda q, kv, b: (q, dataclasses.replace(kv, k=rolled(kv.k, 3)), b),
    "another_head's_queries": lambda q, kv, b: (rolled(q, 1), kv, b),
    "another_head's_scales": lambda q, kv, b: (q, dataclasses.replace(kv, v_scale=rolled(kv.v_scale, 1)), b),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_plausible_wrong_answer_is_out_of_bounds(wrong):
    case = dataclasses.replace(CASES["groups_of_four"], kv_lens=((70, 20), (33, 64)))
    q, kv, batch = inputs(case, jnp.bfloat16, FP8)
    random = jnp.asarray(np.random.default_rng(1).standard_normal(kv.k.shape), FP8)
    kv = dataclasses.replace(kv, k=random, v=random[:, ::-1])  # no NaN in what is wrongly read
    kv = dataclasses.replace(kv, k_scale=jnp.ones((LAYERS, 2)), v_scale=jnp.asarray([[1.0, 2.0]] * LAYERS))
    batch = dataclasses.replace(batch, page_table=jnp.where(batch.page_table == 2**30, 1, batch.page_table))
    expected, _ = reference.paged_attention(q, kv, LAYER, batch, **case.options)
    q, kv, changed = WRONG[wrong](q, kv, batch)
    got, _ = reference.paged_attention(q, kv, LAYER, changed, **case.options)
    assert error(got, expected, batch, jnp.bfloat16) > 1


@pytest.mark.full
@need_interpreter
def test_one_table_for_all_heads_gives_what_a_table_for_each_gives():
    case = dataclasses.replace(CASES["groups_of_four"], kv_lens=((70,), (0,), (130,)))
    q, kv, batch = inputs(case, jnp.bfloat16)
    random = jnp.asarray(np.random.default_rng(1).standard_normal(kv.k.shape), kv.k.dtype)
    kv = KVCache(k=random, v=random[:, ::-1])
    one = AttentionBatch(page_table=batch.page_table[:, 0], kv_lens=batch.kv_lens[:, 0])
    each = AttentionBatch(
        page_table=jnp.stack([one.page_table] * 2, axis=1), kv_lens=jnp.stack([one.kv_lens] * 2, axis=1)
    )
    expected, _ = run(q, kv, one, case.options, "mosaic_gpu")
    got, _ = run(q, kv, each, case.options, "mosaic_gpu")
    assert error(got, expected, each, jnp.bfloat16) < 0.5


@pytest.mark.full
@need_interpreter
def test_a_plan_made_before_gives_what_one_made_on_the_spot_gives():
    case = CASES["groups_of_four"]
    q, kv, batch = inputs(case, jnp.bfloat16)
    prepared = prepare(
        batch, kv, num_rows=q.shape[0], num_heads=case.N, sliding_window=None, implementation="mosaic_gpu"
    )
    assert prepared.work is not None
    for got, expected in zip(
        run(q, kv, prepared, case.options, "mosaic_gpu"), run(q, kv, batch, case.options, "mosaic_gpu"), strict=True
    ):
        np.testing.assert_array_equal(got, expected)


@need_interpreter
@pytest.mark.parametrize(
    ("page_size", "seed"),
    [(64, 0), (16, 1), *(pytest.param(p, s, marks=pytest.mark.full) for p in (64, 128) for s in (1, 2, 3))],
)
def test_the_kernel_plans_what_the_definition_plans(page_size, seed):
    """Of slices without work only that they have none."""
    rng = np.random.default_rng(seed)
    S, K, tiling = 5 + 6 * (seed == 1), 3, decode_work.Tiling(block=64, stages=2, pairs=2, blocks=(3, 20, 7, 2)[seed])
    kv_lens = rng.integers(0, 400, (S, K)) * rng.integers(0, 2, (S, K)) * (seed < 3)
    kv_lens[S - 2 :] = 0  # padding
    table = jnp.asarray(rng.integers(1, 99, (S, K, -(-400 // page_size))), jnp.int32)
    batch = AttentionBatch(page_table=table, kv_lens=jnp.asarray(kv_lens, jnp.int32))
    expected = decode_work.plan(batch, (8 * K, K), page_size, None, tiling)
    found = mosaic_gpu_plan.plan(batch, (8 * K, K), page_size, tiling, interpret=not ON_GPU)
    assert found.prepared_for == expected.prepared_for
    np.testing.assert_array_equal(found.ends, expected.ends)
    np.testing.assert_array_equal(found.start, expected.start)
    works = np.diff(expected.start) > 0
    for name in ("sequence", "head", "at", "kv_len", "first", "last"):
        got, right = (np.asarray(getattr(work.begin, name))[works] for work in (found, expected))
        np.testing.assert_array_equal(got, right, err_msg=name)
    np.testing.assert_array_equal(np.asarray(found.begin_pages)[works], np.asarray(expected.begin_pages)[works])


def test_kernels_for_tpu_say_that_a_sequence_has_one_table():
    q, kv, batch = inputs(Case(32, 8, H=128), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=r"'mosaic_tpu': .*one page table, not one for each KV head"):
        paged_attention(q, kv, LAYER, batch, scale=1.0, implementation="mosaic_tpu")
