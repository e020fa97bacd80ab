"""A cache that random sequences were written into, in chunks, over pages that others had before them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve.layers.kv_cache import write_kv
from jaxserve.layers.sparse import PageMeta
from jaxserve.layers.sparse.page_meta import fold
from jaxserve.pallas_kernels.paged_attention import AttentionBatch, KVCache

PAGE_SIZE, MAX_PAGES, LAYERS, LAYER = 4, 9, 2, 1
N, K, H = 6, 2, 8
NUM_SEQS, ROWS = 3, 16
NUM_PAGES = NUM_SEQS * MAX_PAGES + 1


@dataclasses.dataclass(frozen=True)
class Written:
    """`keys` and `values` are those of each sequence, `[S, MAX_PAGES * PAGE_SIZE, K, H]`, NaN beyond its length."""

    q: Array  # [S, N, H]
    kv: KVCache
    batch: AttentionBatch
    keys: np.ndarray


@functools.partial(jax.jit, static_argnames="page_meta")
def write(kv: KVCache, k: Array, v: Array, pages: Array, offsets: Array, *, page_meta: PageMeta | None) -> KVCache:
    kv = write_kv(kv, jnp.int32(LAYER), k, v, pages, offsets)
    return kv if page_meta is None else fold(kv, jnp.int32(LAYER), page_meta, H, pages, offsets)


def written(page_meta: PageMeta | None, kv_lens: tuple[int, ...], seed: int, stale: float = np.nan) -> Written:
    """Small whole numbers, of which sums are exact and some equal. What was in pages and metadata before is `stale`."""
    rng = np.random.default_rng(seed)
    table = 1 + rng.permutation(NUM_PAGES - 1).reshape(NUM_SEQS, MAX_PAGES)
    keys, values = rng.integers(-4, 5, (2, NUM_SEQS, MAX_PAGES * PAGE_SIZE, K, H)).astype(np.float32)
    pages = jnp.full((LAYERS, NUM_PAGES, PAGE_SIZE, K, H), stale)
    meta = None if page_meta is None else jnp.full((LAYERS, NUM_PAGES, K, page_meta.size(H, PAGE_SIZE)), stale)
    kv = KVCache(k=pages, v=pages, meta=meta)
    places = [(s, p) for s, n in enumerate(kv_lens) for p in range(n)]
    while places:
        cut = rng.integers(1, ROWS + 1)  # a step; the rest of its rows is padding
        (s, p), places = np.array(places[:cut]).T, places[cut:]
        rows = [np.zeros(ROWS, int) for _ in range(4)]
        for row, x in zip(rows, (s, p, table[s, p // PAGE_SIZE], p % PAGE_SIZE), strict=True):
            row[: len(x)] = x
        s, p, ids, offsets = rows
        kv = write(kv, keys[s, p], values[s, p], ids, offsets, page_meta=page_meta)
    for s, n in enumerate(kv_lens):
        keys[s, n:] = np.nan
        table[s, -(-n // PAGE_SIZE) :] = 2**30
    batch = AttentionBatch(page_table=jnp.asarray(table, jnp.int32), kv_lens=jnp.asarray(kv_lens, jnp.int32))
    return Written(jnp.asarray(rng.integers(-4, 5, (NUM_SEQS, N, H)), jnp.float32), kv, batch, keys)


def lengths(seed: int) -> tuple[int, ...]:
    """One of each page boundary now and then, and padding."""
    return tuple(np.random.default_rng(100 + seed).integers(0, MAX_PAGES * PAGE_SIZE + 1, NUM_SEQS).tolist())


def expected_tables(case: Written, pages_of) -> tuple[list, np.ndarray]:
    """Tables of the pages `pages_of(sequence, kv head, length)`, cut to their counts, and the tokens in them [S, K]."""
    tables, lens = [], np.zeros((NUM_SEQS, K), int)
    for s, n in enumerate(np.asarray(case.batch.kv_lens)):
        for k in range(K):
            numbers = pages_of(s, k, int(n)) if n else []
            tables.append(np.asarray(case.batch.page_table)[s, numbers].tolist())
            lens[s, k] = sum(min(PAGE_SIZE, n - number * PAGE_SIZE) for number in numbers)
    return tables, lens


def tables_of(selected: AttentionBatch) -> tuple[list, np.ndarray]:
    """What was selected, in the form of `expected_tables`."""
    lens = np.asarray(selected.kv_lens)
    counts = -(-lens // PAGE_SIZE)
    table = np.asarray(selected.page_table)
    return [table[s, k, : counts[s, k]].tolist() for s in range(NUM_SEQS) for k in range(K)], lens
