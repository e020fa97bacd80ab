"""The shapes on which every implementation of paged attention is compared with the definition."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve.pallas_kernels.paged_attention import AttentionBatch, KVCache, reference
from jaxserve.pallas_kernels.paged_attention.types import FP8

LAYERS, LAYER = 2, 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """`q_lens` None is a decode region of `max_q_len` rows a sequence, else a prefill region padded to `rows`."""

    name: str
    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...] | None = None
    rows: int = 0
    max_q_len: int = 1
    heads: tuple[int, int, int] = (9, 3, 64)  # N, K, H
    page_size: int = 16
    sliding_window: int | None = None
    soft_cap: float | None = None

    @property
    def options(self) -> dict:
        scale = self.heads[2] ** -0.5
        return {"scale": scale, "sliding_window": self.sliding_window, "soft_cap": self.soft_cap}


CASES = (
    Case(name="one_token", kv_lens=(1,)),
    Case(name="ragged_last_page", kv_lens=(17, 31, 32, 33)),
    Case(name="empty_sequence_between", kv_lens=(40, 0, 7, 0)),
    Case(name="lengths_far_apart", kv_lens=(700, 3, 260, 1, 256, 130, 128, 129, 0, 5, 90, 257, 2, 384, 64, 65)),
    Case(name="odd_batch", kv_lens=(20, 300, 5)),
    Case(name="several_query_tokens", kv_lens=(9, 140, 0, 4), max_q_len=4),
    Case(name="eight_query_tokens_window", kv_lens=(300, 8), max_q_len=8, sliding_window=20),
    Case(name="decode_window", kv_lens=(700, 50, 0, 21), sliding_window=21),
    Case(name="decode_window_of_one", kv_lens=(5, 129), sliding_window=1),
    Case(name="decode_soft_cap", kv_lens=(40, 300), soft_cap=2.0),
    Case(name="decode_32_8_128", kv_lens=(77, 130), heads=(32, 8, 128)),
    Case(name="decode_head_dim_256", kv_lens=(77, 130), heads=(8, 4, 256), soft_cap=50.0, sliding_window=64),
    Case(name="decode_multi_head", kv_lens=(33,), heads=(4, 4, 64)),
    Case(name="decode_page_8", kv_lens=(33, 64), page_size=8),
    Case(name="decode_page_64", kv_lens=(65, 64, 700, 96, 97), page_size=64),
    Case(name="prefill_one_token", kv_lens=(1,), q_lens=(1,), rows=16),
    Case(name="prefill_whole", kv_lens=(150,), q_lens=(150,), rows=150),
    Case(name="prefill_padded", kv_lens=(70, 33, 0, 20), q_lens=(70, 33, 0, 20), rows=128),
    Case(name="prefill_chunks", kv_lens=(300, 5, 17), q_lens=(65, 5, 1), rows=80),
    Case(name="prefill_window", kv_lens=(300, 90), q_lens=(130, 90), rows=256, sliding_window=33),
    Case(name="prefill_soft_cap", kv_lens=(40, 50), q_lens=(40, 9), rows=64, soft_cap=2.0),
    Case(name="prefill_32_8_128", kv_lens=(40, 20), q_lens=(30, 20), rows=64, heads=(32, 8, 128)),
    Case(name="prefill_head_dim_256", kv_lens=(40,), q_lens=(40,), rows=64, heads=(8, 4, 256), soft_cap=50.0),
    Case(name="prefill_page_64", kv_lens=(130, 64), q_lens=(70, 64), rows=134, page_size=64),
    Case(name="decode_page_128", kv_lens=(300, 0, 128, 65), page_size=128),
    Case(name="decode_eight_tokens_of_eight_heads", kv_lens=(150, 8, 0, 5), max_q_len=8, heads=(16, 2, 128)),
    Case(name="decode_three_tokens_of_seven_heads", kv_lens=(70, 3), max_q_len=3, heads=(14, 2, 64)),
    Case(name="decode_tiles_of_five_and_two_parts", kv_lens=(1, 1100, 2, 300, 1), heads=(8, 2, 64), page_size=64),
    Case(name="decode_mostly_padding", kv_lens=(700,) + (0,) * 15, heads=(8, 2, 64), page_size=64),
    Case(name="decode_three_heads_of_128", kv_lens=(70, 130), heads=(6, 2, 128)),
    Case(name="prefill_rows_in_place", kv_lens=(300,), q_lens=(128,), rows=128, heads=(4, 2, 64)),
    Case(name="prefill_rows_in_place_padded", kv_lens=(100,), q_lens=(100,), rows=128, heads=(4, 2, 64)),
    Case(name="prefill_rows_in_place_empty_tile", kv_lens=(120,), q_lens=(100,), rows=256, heads=(4, 2, 64)),
    Case(
        name="prefill_many_short",
        kv_lens=(3, 9, 1, 70, 5, 200, 7, 0, 4, 40),
        q_lens=(3, 7, 1, 6, 5, 2, 7, 0, 4, 1),
        rows=48,
        heads=(4, 2, 64),
    ),
    Case(
        name="prefill_page_128", kv_lens=(260, 64, 193), q_lens=(70, 64, 9), rows=150, page_size=128, heads=(2, 1, 256)
    ),
    Case(name="prefill_page_256", kv_lens=(300, 256), q_lens=(70, 64), rows=134, page_size=256, heads=(2, 1, 64)),
)


def inputs(case: Case, dtype, kv_dtype=None, *, unused: float = np.nan) -> tuple[Array, KVCache, AttentionBatch]:
    """Random queries and cache; slots that hold no token hold `unused`, and spare page-table entries a wild id.

    The cache is of `kv_dtype`, else of `dtype`; one in float8 has another scale for each layer and head.
    """
    rng = np.random.default_rng(len(case.name))
    N, K, H = case.heads
    num_seqs, page_size = len(case.kv_lens), case.page_size
    max_pages = -(-max(case.kv_lens) // page_size) + 3
    num_pages = num_seqs * max_pages + 1
    table = 1 + rng.permutation(num_pages - 1).reshape(num_seqs, max_pages)
    used = np.zeros((num_pages, page_size), bool)
    for s, n in enumerate(case.kv_lens):
        positions = np.arange(n)
        used[table[s, positions // page_size], positions % page_size] = True
        table[s, -(-n // page_size) :] = 2**30
    k, v = rng.standard_normal((2, LAYERS, num_pages, page_size, K, H), np.float32)
    k[:, ~used], v[:, ~used] = unused, unused
    k[1 - LAYER], v[1 - LAYER] = unused, unused
    rows = num_seqs * case.max_q_len if case.q_lens is None else case.rows
    q = 2.0 * rng.standard_normal((rows, N, H), np.float32)
    cu_q_lens = None if case.q_lens is None else jnp.asarray(np.cumsum((0, *case.q_lens)), jnp.int32)
    batch = AttentionBatch(
        page_table=jnp.asarray(table, jnp.int32),
        kv_lens=jnp.asarray(case.kv_lens, jnp.int32),
        cu_q_lens=cu_q_lens,
        max_q_len=case.max_q_len,
    )
    kv = KVCache(k=jnp.asarray(k, kv_dtype or dtype), v=jnp.asarray(v, kv_dtype or dtype))
    if kv_dtype == FP8:
        step = np.arange(2)[:, None, None] + np.arange(LAYERS)[:, None] + np.arange(K)
        k_scale, v_scale = jnp.asarray(0.4 * 2.0 ** (step % 3) * rng.uniform(0.9, 1.1, step.shape), jnp.float32)
        kv = dataclasses.replace(kv, k_scale=k_scale, v_scale=v_scale)
    return jnp.asarray(q, dtype), kv, batch


def error(got, expected, batch, dtype) -> float:
    """The largest error of any row in units of its bound: epsilon x sqrt(length of its sums) x the output's scale.

    A row's sums run over head_dim in the scores and over the positions it sees in the output.
    """
    positions = np.array([p for _, p in reference.query_positions(batch, len(got))])
    bound = float(jnp.finfo(dtype).eps) * np.sqrt(positions + 1 + got.shape[-1]) * np.abs(expected).max()
    return float((np.abs(got - expected).max(axis=(1, 2)) / bound).max())
