"""What paged attention reads: the pages of one layer kind, and the sequences of one region."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

FP8 = jnp.float8_e4m3fn
FP8_MAX = 448.0


LANES = 128  # numbers in a row of a TPU's memory


def whole_rows(position_rows: int, dtype: DTypeLike) -> bool:
    """Whether a position of so many rows lies in a TPU's memory unpadded. Found by compiling for v5e, v5p, v6e, 7x."""
    return position_rows in ((1, 4) if jnp.dtype(dtype) == FP8 else (1, 2, 4)) or position_rows % 8 == 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCache:
    """All layers' pages of one layer kind. Page 0, on a mesh that of each rank, is never allocated: padding
    rows write there.

    Where `layers.kv_cache` says so, on TPU, the two last dimensions are those of rows that hold the heads one after the
    other: [.., K * H / 128, 128].

    With pages in float8_e4m3fn, keys are `k_scale * k` and values `v_scale * v`: there is one scale a layer and head.

    Sparse attention (`layers.sparse`) keeps `meta` of each page's keys, where M is up to its policy, and `carry`, which
    pages each slot's sequence selected last: their numbers in it, ascending, then -1. Within a step `chosen` has those
    that the last layer that chose has chosen for each decode row and each prefill row. Where it drops tokens, `mass` is
    the attention that each has drawn since its key was written, summed over rows and the query heads of the group; -inf
    says that the KV head has dropped it: then tables for each KV head pass it over, others read it still.
    """

    k: Array  # [L, P, page_size, K, H]
    v: Array  # [L, P, page_size, K, H]
    k_scale: Array | None = None  # f32 [L, K], above 0; None = 1
    v_scale: Array | None = None
    meta: Array | None = None  # [L, P, K, M]
    carry: Array | None = None  # i32 [L, Z, K, C]
    chosen: tuple[Array, Array] | None = None  # i32 [B, K, C] and [T, K, C]
    mass: Array | None = None  # f32 [L, P, K, page_size]

    @classmethod
    def zeros(
        cls,
        num_layers: int,
        num_pages: int,
        page_size: int,
        position: tuple[int, int],
        dtype: DTypeLike,
        *,
        num_kv_heads: int,
    ) -> "KVCache":
        """Empty pages of this dtype, with scales of 1 if it is float8_e4m3fn; `position` is the shape of each."""
        shape = (num_layers, num_pages, page_size, *position)
        scales = [jnp.ones((num_layers, num_kv_heads)) if dtype == FP8 else None for _ in range(2)]
        return cls(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype), k_scale=scales[0], v_scale=scales[1])

    @property
    def page_size(self) -> int:
        return self.k.shape[2]

    def num_heads(self, head_dim: int) -> int:
        return self.k.shape[3] * self.k.shape[4] // head_dim

    def layer_scales(self, layer: int | Array) -> tuple[Array, Array] | None:
        """The scales of keys and of values in one layer, f32 [K] each; None where nothing is scaled."""
        if self.k_scale is None or self.v_scale is None:
            return None
        return self.k_scale[layer], self.v_scale[layer]


def quantize(x: Array, scale: Array) -> Array:
    """`x / scale` in float8_e4m3fn, rounded to the nearest; what is out of range becomes the largest, 448, and NaN
    stays NaN. `x` is [T, K, H], `scale` f32 [K].
    """
    return jnp.clip(x.astype(jnp.float32) / scale[None, :, None], -FP8_MAX, FP8_MAX).astype(FP8)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionBatch:
    """The sequences of one region, decode or prefill.

    Query tokens are packed: those of sequence s are rows `[cu_q_lens[s], cu_q_lens[s+1])` of q and they are the last
    ones before `kv_lens[s]`: row j of them sits at position `kv_lens[s] - q_len[s] + j`. A padding sequence has
    q_len 0 and kv_len 0; rows at and beyond `cu_q_lens[-1]` are padding and come out as zeros.
    In the decode region every sequence has exactly `max_q_len` rows (padding ones too), so that no packing is needed:
    there row `s * max_q_len + j` belongs to s, and a padding sequence has kv_len 0.

    A decode region with one row a sequence may have a table for each KV head (`layers.sparse`): `page_table`
    [S, K, max_pages] and `kv_lens` [S, K]. Then a row sees, with the heads of each group, all tokens of these pages
    that the KV head has not dropped; only the last page may be part full.
    """

    page_table: Array  # i32 [S, max_pages], ids of all ranks' pages, or of this rank's once prepared
    kv_lens: Array  # i32 [S], KV positions after this step's write
    cu_q_lens: Array | None = None  # i32 [S+1], prefill region; None = decode region
    # Where the table holds only some pages of each sequence, in order (`sharding.kv_parallel`); None = all of them
    page_numbers: Array | None = None  # i32 [S, max_pages], which page of its sequence each is
    own_lens: Array | None = None  # i32 [S], tokens in them
    slots: Array | None = None  # i32 [S], of state by slot; for sparse attention, as the next
    prompt_lens: Array | None = None  # i32 [S], the positions before them are the prompt's; None = all are
    work: Any = None  # what `prepare` made of the above for the implementation in use
    max_q_len: int = dataclasses.field(default=1, metadata={"static": True})  # decode region: query rows a sequence

    @property
    def by_kv_head(self) -> bool:
        """Whether each KV head has a table of its own."""
        return self.page_table.ndim == 3
