"""Attention of a step's rows in layers with policies."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxserve.layers.sparse.hooks import LayerPolicies, Policy
from jaxserve.layers.sparse.selection import select_pages
from jaxserve.pallas_kernels.paged_attention.types import AttentionBatch, KVCache

ROWS_A_TURN = 8

Attention = Callable[[Array, AttentionBatch], tuple[Array, Array]]  # of query rows to a region: output and lse


def attend_selected(
    policy: Policy,
    q: Float[Array, "S N H"],
    kv: KVCache,
    layer: int | Int[Array, ""],
    region: AttentionBatch,
    attention: Attention,
) -> tuple[Float[Array, "S N H"], Float[Array, "S N"]]:
    """Attention of a decode region's rows to what the policy selects; with that, `attention` gets the region."""
    return attention(q, select_pages(policy, q, kv, layer, region))


def attend_prefill(
    policies: LayerPolicies,
    q: Float[Array, "T N H"],
    kv: KVCache,
    layer: int | Int[Array, ""],
    region: AttentionBatch,
    is_answer: Bool[Array, " T"] | None,
    attention: Attention,
    dense: Callable[[], tuple[Array, Array]],
) -> tuple[Float[Array, "T N H"], Float[Array, "T N"]]:
    """Attention of a prefill region's rows, each under the policy for its kind of token.

    A row that has a policy is a sequence of its own, of the tokens up to it. Answers are in this region only when they
    are computed again. Without such rows their policy costs a loop of no turns.

    Args:
        region: with the pages of all ranks.
        is_answer: None = none is.
        dense: attention of all rows to all that they see.
    """
    assert region.cu_q_lens is not None
    T = q.shape[0]
    row = jnp.arange(T, dtype=jnp.int32)
    sequence = jnp.minimum(jnp.searchsorted(region.cu_q_lens, row, side="right") - 1, region.kv_lens.shape[0] - 1)
    is_row = row < region.cu_q_lens[-1]
    seen = region.kv_lens[sequence] - (region.cu_q_lens[sequence + 1] - row) + 1
    answers = jnp.zeros(T, bool) if is_answer is None else is_answer
    out = dense() if None in policies else (jnp.zeros(q.shape, q.dtype), jnp.full(q.shape[:2], -jnp.inf))
    for policy, mine in ((policies.prefill, is_row & ~answers), (policies.decode, is_row & answers)):
        if policy is not None:
            out = _attend_rows(policy, q, kv, layer, region.page_table, sequence, seen, mine, attention, out)
    return out


def _attend_rows(
    policy: Policy,
    q: Array,
    kv: KVCache,
    layer: int | Array,
    page_table: Array,
    sequence: Array,  # i32 [T], whose row of the table is a row's
    seen: Array,  # i32 [T], positions that each row sees
    mine: Array,  # bool [T]
    attention: Attention,
    out: tuple[Array, Array],
) -> tuple[Array, Array]:
    """`out` with that of these rows in it."""
    order = jnp.pad(jnp.argsort(~mine, stable=True), (0, ROWS_A_TURN))
    count = jnp.sum(mine)

    def turn(i: Array, out: tuple[Array, Array]) -> tuple[Array, Array]:
        rows = jax.lax.dynamic_slice_in_dim(order, i * ROWS_A_TURN, ROWS_A_TURN)
        is_row = i * ROWS_A_TURN + jnp.arange(ROWS_A_TURN) < count
        region = AttentionBatch(page_table=page_table[sequence[rows]], kv_lens=jnp.where(is_row, seen[rows], 0))
        new = attend_selected(policy, q[rows], kv, layer, region, attention)
        to = jnp.where(is_row, rows, mine.shape[0])
        return jax.tree.map(lambda x, y: x.at[to].set(y.astype(x.dtype), mode="drop"), out, new)

    return jax.lax.fori_loop(0, -(-count // ROWS_A_TURN), turn, out)
