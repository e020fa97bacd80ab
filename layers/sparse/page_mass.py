"""How much of a row's attention each page of its sequence has."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jaxserve.pallas_kernels.paged_attention.types import AttentionBatch, KVCache
from jaxserve.sharding.collectives import axis_size
from jaxserve.sharding.kv_parallel import AXIS, local_pages, sum_over_kv

PAGES_A_TURN = 64


def page_masses(
    attention: Callable[..., tuple[Array, Array]],
    q: Float[Array, "T N H"],
    kv: KVCache,
    page_table: Int[Array, "T max_pages"],
    kv_lens: Int[Array, " T"],
) -> Float[Array, "T K max_pages"]:
    """The sum over a group's heads of the softmax's mass on each page, float32. The same on all ranks of kv.

    Args:
        attention: of rows to a decode region of this rank's pages: output and log-sum-exp.
        page_table: ids of all ranks' pages. kv_lens: positions that each row sees; 0 for padding, which has no mass.
    """
    (T, N, H), max_pages = q.shape, page_table.shape[1]
    block = min(max_pages, PAGES_A_TURN)
    local = page_table if axis_size(AXIS) == 1 else local_pages(page_table, kv.k.shape[1])
    local = jnp.pad(local, ((0, 0), (0, -max_pages % block)), constant_values=-1)
    copies = jnp.repeat(q, block, axis=0)

    def turn(i: Array, found: Array) -> Array:
        page = jax.lax.dynamic_slice_in_dim(local, i * block, block, axis=1)
        number = i * block + jnp.arange(block)
        tokens = jnp.clip(kv_lens[:, None] - number[None] * kv.page_size, 0, kv.page_size)
        tokens = jnp.where(page >= 0, tokens, 0)
        region = AttentionBatch(page_table=jnp.maximum(page, 0).reshape(-1, 1), kv_lens=tokens.reshape(-1))
        lse = attention(copies, region)[1].reshape(T, block, N)
        mine = jnp.where((tokens > 0)[..., None], lse, 0.0)  # so that a sum over ranks is what the page's owner has
        return jax.lax.dynamic_update_slice_in_dim(found, mine, i * block, axis=1)

    turns = -(-jnp.max(-(-kv_lens // kv.page_size)) // block)
    lse = jax.lax.fori_loop(0, turns, turn, jnp.zeros((T, local.shape[1], N), jnp.float32))
    seen = jnp.arange(max_pages)[None] * kv.page_size < kv_lens[:, None]
    lse = jnp.where(seen[..., None], sum_over_kv(lse[:, :max_pages]), -jnp.inf)
    top = jnp.max(jnp.maximum(lse, jnp.finfo(jnp.float32).min), axis=1, keepdims=True)  # of padding too a number
    mass = jnp.exp(lse - top)
    mass /= jnp.maximum(jnp.sum(mass, axis=1, keepdims=True), 1e-30)
    return jnp.sum(mass.reshape(T, max_pages, kv.num_heads(H), -1), axis=3).transpose(0, 2, 1)
