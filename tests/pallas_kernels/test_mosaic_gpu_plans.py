"""How the Hopper kernels share out their work, without the kernels: random regions, and what a worker would walk."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from benchmarks import tune
from jaxserve.pallas_kernels.paged_attention import (
    AttentionBatch,
    KVCache,
    decode_work as decode,
    mosaic_gpu,
    prefill_work as prefill,
)
from jaxserve.pallas_kernels.paged_attention.hopper import Scoring

TILING = decode.Tiling(block=64, stages=3, pairs=2, blocks=7)


def decode_batch(kv_lens, q_len: int) -> AttentionBatch:
    table = 1 + np.arange(len(kv_lens) * 500).reshape(len(kv_lens), 500)
    return AttentionBatch(
        page_table=jnp.asarray(table, jnp.int32), kv_lens=jnp.asarray(kv_lens, jnp.int32), max_q_len=q_len
    )


def visible_blocks(kv_len: int, q_len: int, window: int | None) -> range:
    """Blocks with a position that some query row sees; an empty sequence has one of its own."""
    rows = [position for position in range(kv_len - q_len, kv_len) if position >= 0]
    if not rows:
        return range(1)
    lowest = 0 if window is None else max(0, rows[0] - window + 1)
    return range(lowest // TILING.block, rows[-1] // TILING.block + 1)


def all_units(kv_lens, shared: int, q_len: int, window: int | None) -> list[tuple[int, int, int]]:
    """(sequence, block, head) of one tile, as they are numbered; what is empty at the end is padding."""
    num_used = max((s + 1 for s, n in enumerate(kv_lens) if n), default=0)
    return [
        (s, block, head)
        for s, n in enumerate(kv_lens[:num_used])
        for block in visible_blocks(n, q_len, window)
        for head in range(shared)
    ]


def walk(work: decode.Work, number: int, kv_lens, shared: int, q_len: int, window: int | None):
    """The units of one slice, from its first on."""
    sequence, at, head = (int(x[number]) for x in (work.begin.sequence, work.begin.at, work.begin.head))
    for _ in range(int(work.start[number + 1] - work.start[number])):
        yield sequence, at, head
        head += 1
        if head == shared:
            at, head = at + 1, 0
        if at == visible_blocks(kv_lens[sequence], q_len, window).stop:
            sequence += 1
            if sequence < len(kv_lens):
                at = visible_blocks(kv_lens[sequence], q_len, window).start


LENGTHS = {
    "all_kinds": lambda rng: rng.integers(0, 2000, 9) * rng.integers(0, 2, 9),
    "one_long": lambda rng: np.array([1, 0, 8000, 3, 64, 65, 63, 128, 0]),
    "few_units": lambda rng: rng.integers(0, 65, 9) * (np.arange(9) % 4 == 0),
    "empty": lambda rng: np.zeros(9, int),
}


# Numbers of query and of KV heads, and how many KV heads and tiles that makes
HEADS = {(12, 3): (1, 3), (16, 8): (4, 2), (8, 8): (8, 1), (7, 1): (1, 1)}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(
    ("heads", "q_len", "window"), [((12, 3), 1, None), ((7, 1), 4, None), ((16, 8), 1, 100), ((8, 8), 1, 64)]
)
def test_decode_slices_share_all_units_equally(heads, q_len, window, lengths):
    shared, num_tiles = HEADS[heads]
    scoring = Scoring(scale=1.0, sliding_window=window, soft_cap=None)
    how = {"q_len": q_len, "group": heads[0] // heads[1], "as_they_are": False, "scoring": scoring, "tiling": TILING}
    options = decode.Options(**how, shared=shared, num_tiles=num_tiles)
    plan = jax.jit(functools.partial(decode.plan, heads=heads, page_size=16, sliding_window=window, tiling=TILING))
    for seed in range(10):
        kv_lens = LENGTHS[lengths](np.random.default_rng(seed)).tolist()
        work = jax.tree.map(np.asarray, plan(decode_batch(kv_lens, q_len)))
        assert work.start.shape == (options.slices + 1,)
        assert np.ptp(np.diff(work.start)) <= 1
        found = [list(walk(work, number, kv_lens, shared, q_len, window)) for number in range(options.slices)]
        expected = all_units(kv_lens, shared, q_len, window)
        assert [*itertools.chain(*found)] == expected
        ends = np.cumsum(np.bincount([unit[0] for unit in expected], minlength=len(kv_lens)))
        np.testing.assert_array_equal(work.ends, ends)
        assert work.start[-1] == ends[-1]
        if expected:
            check_split_tiles(work, found, options)
        check_what_a_slice_knows_of_its_first_unit(work, kv_lens, q_len, window)


@pytest.mark.parametrize(("batch", "used"), [(16, 16), (32, 16), (48, 16), (15, 17), (31, 17), (8, 17), (1, 17)])
def test_equally_long_sequences_are_not_split_if_few_workers_are_left_over(batch, used):
    """Of 17. Eight sequences would leave half of them idle."""
    tiling = dataclasses.replace(TILING, pairs=1, blocks=17)

    def sizes(lengths) -> np.ndarray:
        return np.diff(decode.plan(decode_batch(lengths, 1), (8, 1), 64, None, tiling).start)

    for lengths in ([2000] * batch, [1990, *[2000] * (batch - 1)]):  # all of 32 blocks
        assert np.count_nonzero(sizes(lengths)) == used
        assert used == 17 or not (sizes(lengths) % 32).any()
    if batch > 1:
        assert np.count_nonzero(sizes([1900, *[2000] * (batch - 1)])) == 17


def check_split_tiles(work: decode.Work, found, options: decode.Options) -> None:
    """Which slices have some of a tile can be looked up by its sequence and, if it is split, by who begins it."""
    expected: dict[int, list[int]] = {}
    for number, units in enumerate(found):
        for sequence in dict.fromkeys(sequence for sequence, _, _ in units):
            expected.setdefault(sequence, []).append(number)
    share, sequences = [part[0] for part in work.share], jnp.asarray([*expected])
    num_blocks = (np.diff(work.ends, prepend=0) // options.shared)[sequences]
    firsts, counts = decode.slices_of_tile(work.ends[sequences], num_blocks, share, options.shared)
    assert [[*range(w, w + n)] for w, n in zip(firsts, counts, strict=True)] == [*expected.values()]

    numbers = jnp.arange(options.slices - 1)
    after = jax.tree.map(lambda field: field[1:], work.begin)
    counts = np.asarray(decode.slices_of_begun_tile(numbers, work.start[1:-1], after, share, options.shared))
    found_tiles = {after.sequence[w]: [*range(w, w + counts[w])] for w in np.flatnonzero(counts)}
    assert np.count_nonzero(counts) == len(found_tiles)
    assert found_tiles == {tile: those for tile, those in expected.items() if len(those) > 1}


def check_what_a_slice_knows_of_its_first_unit(work: decode.Work, kv_lens, q_len: int, window: int | None) -> None:
    for number in np.flatnonzero(np.diff(work.start)):
        kv_len = kv_lens[work.begin.sequence[number]]
        blocks = visible_blocks(kv_len, q_len, window)
        assert work.begin.kv_len[number] == kv_len
        assert (work.begin.first[number], work.begin.last[number]) == (blocks.start, blocks.stop)
        last_page = max(0, -(-kv_len // 16) - 1)
        pages = [min(4 * work.begin.at[number] + j, last_page) for j in range(4)]
        of_sequence = 1 + 500 * work.begin.sequence[number]
        assert work.begin_pages[number].tolist() == [of_sequence + page if kv_len else 0 for page in pages]


def prefill_batch(kv_lens, q_lens) -> AttentionBatch:
    return AttentionBatch(
        page_table=jnp.zeros((len(kv_lens), 1), jnp.int32),
        kv_lens=jnp.asarray(kv_lens, jnp.int32),
        cu_q_lens=jnp.asarray(np.cumsum([0, *q_lens]), jnp.int32),
    )


QUERIES = {  # rows of the region, query tokens of its sequences
    "mixed": lambda rng: (600, rng.integers(0, 120, 5)),
    "full": lambda rng: (512, rng.multinomial(512, [0.6, 0.3, 0.1, 0.0])),
    "shorter_than_a_unit": lambda rng: (64, rng.integers(0, 8, 9)),
    "multiples_of_a_tile": lambda rng: (512, np.array([128, 0, 256, 128])),
    "lone": lambda rng: (256, rng.integers(1, 257, 1)),
    "empty": lambda rng: (16, np.zeros(2, int)),
}


@pytest.mark.parametrize("queries", QUERIES)
def test_every_prefill_row_is_in_one_tile_and_heavy_tiles_come_first(queries):
    plan = jax.jit(prefill.plan, static_argnums=1)
    for seed in range(10):
        rng = np.random.default_rng(seed)
        num_rows, q_lens = QUERIES[queries](rng)
        kv_lens = q_lens + rng.integers(0, 900, q_lens.size) * (q_lens > 0)
        work = jax.tree.map(np.asarray, plan(prefill_batch(kv_lens, q_lens), num_rows))
        live = int(work.num_tiles[0])
        assert (work.num_rows[:live] > 0).all()
        assert (work.num_rows[live:] == 0).all()
        assert (np.diff(work.position[:live]) <= 0).all()
        assert sorted(work.tile) == list(range(work.tile.size))
        check_rows(work, live, kv_lens, q_lens)
        # What a tile loads stays in the view, in which any row may be read, and what it stores in the output
        assert (work.row[:live] * prefill.UNIT + prefill.TILE).max(initial=0) <= work.view.size
        assert work.view.min() >= 0
        assert work.view.max() < num_rows
        assert work.place.min() >= 0
        assert work.place.max() < work.tile.size * prefill.TILE


def check_rows(work: prefill.Work, live: int, kv_lens, q_lens) -> None:
    """Every query row is one row of one tile, which knows its sequence, its position and its place in the output."""
    starts = np.cumsum(q_lens) - q_lens
    covered = []
    for i in range(live):
        sequence = work.sequence[i]
        for r in range(work.num_rows[i]):
            row = work.view[work.row[i] * prefill.UNIT + r]
            offset = row - starts[sequence]
            assert 0 <= offset < q_lens[sequence]
            assert work.position[i] + r == kv_lens[sequence] - q_lens[sequence] + offset
            assert work.place[row] == work.tile[i] * prefill.TILE + r
            covered.append(row)
    assert sorted(covered) == list(range(q_lens.sum()))


def cache(head_dim: int, dtype=jnp.bfloat16) -> KVCache:
    pages = jax.ShapeDtypeStruct((1, 2, 64, 1, head_dim), dtype)
    return KVCache(k=pages, v=pages)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize("q_len", [1, 8])
def test_every_tiling_of_decode_fits_the_shared_memory(head_dim, itemsize, q_len):
    dtype = jnp.bfloat16 if itemsize == 2 else jnp.float8_e4m3fn
    tiling, rows = mosaic_gpu.decode_tiling(cache(head_dim, dtype), 8, q_len), 8 * q_len
    ahead = 2 * tiling.stages * tiling.block * head_dim * itemsize
    of_rows = rows * (head_dim * 2 + tiling.block * (4 + 2) + 3 * 4)  # queries, scores, weights, three values each
    widened = tiling.block * head_dim * 2 if itemsize == 1 else 0
    assert tiling.stages >= (3 if q_len == 1 else 2)
    assert tiling.pairs * (ahead + of_rows + widened) <= 232_448 - 2048


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_tiling_of_prefill_fits_the_shared_memory(head_dim):
    tiling = mosaic_gpu.prefill_tiling(cache(head_dim))
    queries, unit = 2 * mosaic_gpu.ROWS * head_dim * 2, 2 * tiling.block * head_dim * 2
    assert tiling.stages >= 2
    assert queries + tiling.stages * unit <= 232_448 - 2048


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_tiling_of_prefill_for_pages_in_float8_fits_beside_what_they_become(head_dim):
    tiling = mosaic_gpu.prefill_tiling(cache(head_dim, jnp.float8_e4m3fn))
    ahead, pages_ahead = prefill.rows_ahead(tiling.block, tiling.stages, head_dim, is_fp8=True)
    assert 1 <= pages_ahead <= tiling.stages
    rows = {1: 2, 2: 6}[ahead] * mosaic_gpu.ROWS * head_dim * 2
    blocks = 2 * tiling.block * head_dim * (2 * tiling.stages + pages_ahead)
    assert rows + blocks <= 232_448 - 2048


def test_a_tiling_that_was_measured_in_bfloat16_is_not_taken_for_float8():
    assert mosaic_gpu.decode_tiling(cache(128), 8, 1).stages == 3
    assert mosaic_gpu.decode_tiling(cache(128, jnp.float8_e4m3fn), 8, 1).pairs == 3


def test_a_measured_tiling_takes_the_place_of_the_computed_one(monkeypatch):
    computed = mosaic_gpu.decode_tiling(cache(64), 8, 1)
    monkeypatch.setitem(mosaic_gpu.TILINGS["decode"], "64", {"block": 128, "pairs": 1, "stages": 5})
    measured = mosaic_gpu.decode_tiling(cache(64), 8, 1)
    assert (measured.block, measured.pairs, measured.stages) == (128, 1, 5)
    assert (computed.block, computed.pairs) == (64, 2)
    assert mosaic_gpu.prefill_tiling(cache(64)).block == 128


@pytest.mark.parametrize(("kernel", "fastest"), [("decode", {"block": 64, "stages": 2, "pairs": 2}), ("prefill", None)])
def test_what_tuning_writes_is_the_winner_be_it_the_computed_one(monkeypatch, kernel, fastest):
    tried = []

    def seconds(kernel, head_dim):
        tried.append(mosaic_gpu.tuned(kernel, head_dim))
        return [1.0 if tried[-1] == fastest else 2.0] * 3

    monkeypatch.setattr(tune, "seconds", seconds)
    monkeypatch.setitem(mosaic_gpu.TILINGS, kernel, {"128": {"block": 64, "stages": 1}})
    assert tune.best(kernel, 128, Console(quiet=True)) == (fastest or {"block": 128, "stages": 2})
    assert tried[0] == mosaic_gpu.computed(kernel, 128)
    assert tried[0] in tried[1:]
