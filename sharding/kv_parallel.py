"""KV parallelism (Helix, arXiv 2507.07120): each rank of `kv` attends to its own pages, then results are merged.

How this works: rank r owns the pages `[r * n, (r + 1) * n)` of all, and its first one is its null page. `own_page` and
`layers.attention.own_pages` turn what a step says of pages into what concerns this rank. After attention every rank of
`kv` has a part of the result of each query head. One all_to_all gives each rank the parts of its share of the heads,
and they are merged by their log-sum-exp. Prompts and decodes go the same way. Without a mesh, or with one rank of `kv`,
all are the identity.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, Num

from jaxserve.sharding.collectives import axis_size

AXIS = "kv"


def own_page(page_ids: Int[Array, "*shape"], num_pages: int) -> Int[Array, "*shape"]:
    """Pages to write to, among the `num_pages` of this rank: its null page for what other ranks own."""
    return page_ids if axis_size(AXIS) == 1 else jnp.maximum(local_pages(page_ids, num_pages), 0)


def local_pages(page_ids: Int[Array, "*shape"], num_pages: int) -> Int[Array, "*shape"]:
    """Pages of all ranks as this rank counts its `num_pages`, from 0; -1 for what other ranks own."""
    local = page_ids - jax.lax.axis_index(AXIS) * num_pages
    return jnp.where((local >= 0) & (local < num_pages), local, -1)


def merge_over_kv(out: Float[Array, "rows N H"], lse: Float[Array, "rows N"]) -> Float[Array, "rows own H"]:
    """Attention over all ranks' pages, of this rank's share of the heads, `N / kv`.

    Args:
        out: attention over this rank's pages. lse: its log-sum-exp, float32, -inf where it saw nothing.
    """
    if axis_size(AXIS) == 1:
        return out
    parts = jax.lax.all_to_all(_pack(out, lse), AXIS, split_axis=1, concat_axis=0)  # a new axis 0, of ranks
    outs, lses = _unpack(parts, out)
    top = jnp.max(lses, axis=0, keepdims=True)
    weights = jnp.exp(lses - jnp.where(top == -jnp.inf, 0.0, top))
    total = jnp.sum(weights, axis=0)  # 0 where no rank has seen anything
    merged = jnp.sum(outs.astype(jnp.float32) * weights[..., None], axis=0)
    return (merged / jnp.where(total == 0.0, 1.0, total)[..., None]).astype(out.dtype)


def lse_over_kv(lse: Float[Array, "rows N"]) -> Float[Array, "rows N"]:
    """The log-sum-exp of attention over all ranks' pages, on all of them."""
    return lse if axis_size(AXIS) == 1 else jax.nn.logsumexp(jax.lax.all_gather(lse, AXIS), axis=0)


def sum_over_kv(x: Num[Array, "*shape"]) -> Num[Array, "*shape"]:
    """The sum over the ranks of `kv`, on all of them."""
    return x if axis_size(AXIS) == 1 else jax.lax.psum(x, AXIS)


def _pack(out: Array, lse: Array) -> Array:
    """Both in one array, by the rank that gets it: [rows, kv, N / kv, H + 1 or 2], as a float32 has 1 or 2 of `out`'s
    elements."""
    bits = jax.lax.bitcast_convert_type(lse, out.dtype).reshape(*lse.shape, -1)
    packed = jnp.concatenate([out, bits], axis=-1)
    return packed.reshape(packed.shape[0], axis_size(AXIS), -1, packed.shape[-1])


def _unpack(packed: Array, out: Array) -> tuple[Array, Array]:
    outs, bits = packed[..., : out.shape[-1]], packed[..., out.shape[-1] :]
    bits = bits[..., 0] if bits.shape[-1] == 1 else bits
    return outs, jax.lax.bitcast_convert_type(bits, jnp.float32)
