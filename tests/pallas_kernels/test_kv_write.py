"""The TPU kernel that writes keys and values, against a scatter, in the TPU's interpreter."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels.kv_write import kv_write, unsupported
from jaxserve.pallas_kernels.paged_attention.types import FP8, KVCache

LAYERS, PAGES, PAGE_SIZE = 2, 6, 32
INTERPRETERS = {
    mode: pltpu.InterpretParams(detect_races=True, vector_clock_size=64, dma_execution_mode=mode)
    for mode in ("eager", "on_wait")
}
# Pages and first offsets of the rows of sequences that follow each other, and how many rows
STEPS = {
    "decode": [(1, 31, 1), (0, 0, 1), (3, 0, 1), (2, 7, 1), (0, 0, 1)],
    "prompts": [(1, 5, 27), (2, 0, 32), (4, 0, 3), (3, 16, 16), (0, 0, 20), (5, 30, 2), (0, 3, 1)],
    # Padding with what could be the ends of a run, and rows of others between
    "padding_far_apart": [(0, 3, 1), *((1 + i % 5, i, 1) for i in range(14)), (0, 18, 1), (3, 20, 1)],
    "a_run_at_the_end": [(5, 0, 2), (4, 16, 16)],
}


def step(name, position, dtype):
    parts = STEPS[name]
    page_ids = np.concatenate([np.full(count, page) for page, _, count in parts])
    offsets = np.concatenate([np.arange(first, first + count) for _, first, count in parts])
    rng = np.random.default_rng(0)
    rows, pages = (
        [jnp.asarray(rng.normal(size=(*shape, *position)), dtype) for _ in range(2)]
        for shape in ((len(page_ids),), (LAYERS, PAGES, PAGE_SIZE))
    )
    return rows, pages, page_ids.astype(np.int32), offsets.astype(np.int32)


@pytest.mark.parametrize("mode", INTERPRETERS)
@pytest.mark.parametrize(
    ("name", "position", "dtype"),
    [
        ("decode", (8, 128), jnp.bfloat16),
        ("prompts", (4, 128), FP8),
        ("padding_far_apart", (4, 128), jnp.bfloat16),
        ("a_run_at_the_end", (2, 128), jnp.bfloat16),
    ],
)
def test_each_row_lies_at_its_place_and_nothing_else_is_touched(name, position, dtype, mode):
    rows, pages, page_ids, offsets = step(name, position, dtype)
    got = kv_write(rows, pages, jnp.int32(1), page_ids, offsets, interpret=INTERPRETERS[mode])
    real = page_ids > 0
    for x, page, out in zip(rows, pages, got, strict=True):
        expected = page.at[1, page_ids[real], offsets[real]].set(x[real])
        np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(expected, np.float32))
    pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.parametrize(
    ("position", "dtype", "words"),
    [
        ((8, 128), jnp.float32, "bfloat16 or float8_e4m3fn, got float32"),
        ((3, 64), jnp.bfloat16, "rows of 128 numbers, as on a TPU, got 64"),
        ((6, 128), jnp.bfloat16, "1, 2, 4 or a multiple of 8 rows of 128, got 6"),
        ((2, 128), FP8, "1, 4 or a multiple of 8 rows of 128, got 2"),
        ((1, 128), jnp.bfloat16, "positions of one row lie in tiles"),
    ],
)
def test_what_it_cannot_write_to(position, dtype, words):
    kv = KVCache.zeros(LAYERS, PAGES, PAGE_SIZE, position, dtype, num_kv_heads=position[0])
    assert words in (unsupported(kv, 8) or "")
    kv = KVCache.zeros(LAYERS, PAGES, PAGE_SIZE, (8, 128), jnp.bfloat16, num_kv_heads=8)
    assert unsupported(kv, 8) is None
    assert unsupported(kv, 70_000) == "a step may have 65536 rows, got 70000"
