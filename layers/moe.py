"""Mixture of experts: each token passes the few experts that its router picks.

On Hopper GPUs and TPUs the kernels of `pallas_kernels/grouped_matmul` do it. How it works elsewhere: the (token,
expert) pairs are sorted by expert, so that the rows of one expert lie together. A loop walks over blocks of these rows;
its trip count is the number of blocks in use, so an expert without rows costs nothing and one with many rows takes
several turns. A block that reaches past its expert's rows computes a few wrong ones; the blocks that own those rows
come later and overwrite them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxserve.layers.linear import Weight, linear
from jaxserve.layers.mlp import Act, local_mlp
from jaxserve.pallas_kernels import grouped_matmul, paged_attention
from jaxserve.pallas_kernels.fallback import say_once
from jaxserve.sharding.collectives import all_reduce, first_of_rank, num_ranks


def route(
    x: Float[Array, "T D"], router: Weight, top_k: int, *, normalize: bool
) -> tuple[Float[Array, "T top_k"], Int[Array, "T top_k"]]:
    """The `top_k` experts of each token and their weights: softmax over all experts, float32.

    With `normalize` the chosen weights are divided by their sum.
    """
    probs = jax.nn.softmax(linear(x, router, out_dtype=jnp.float32), axis=-1)
    weights, experts = jax.lax.top_k(probs, top_k)
    if normalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, experts


def moe(
    x: Float[Array, "T D"],
    router: Weight,
    gate_up: Any,
    down: Any,
    *,
    top_k: int,
    normalize: bool,
    act: Act,
    layer: int | Int[Array, ""] | None = None,
    real: Bool[Array, " T"] | None = None,
    implementation: paged_attention.Implementation | None = None,
) -> tuple[Float[Array, "T D"], Int[Array, ""]]:
    """`sum over the token's experts e of weight_e * mlp(x, gate_up[e], down[e])`, summed in float32.

    The second result is how many experts were picked. On a mesh gate_up and down hold this rank's experts, and the
    second result counts those of one rank.

    Args:
        router: [E, D]. gate_up: [E, 2F, D]. down: [E, D, F].
        layer: given, gate_up and down are the stacks of all layers, [L, E, 2F, D] and [L, E, D, F], and this is which.
        real: rows that pick experts; others come out as zeros. None = all.
        implementation: as of attention; None = the fastest here.
    """
    if layer is None:
        gate_up, down = jax.tree.map(lambda w: w[None], (gate_up, down))
        layer = 0
    implementation = implementation or paged_attention.preferred()
    if _by_kernels(x, gate_up, down, top_k, act, implementation):
        logits = linear(x, router, out_dtype=jnp.float32)
        y, num_picked = grouped_matmul.fused_moe(
            x,
            logits,
            gate_up,
            down,
            layer,
            top_k=top_k,
            normalize=normalize,
            act=act,
            real=real,
            first_expert=first_of_rank(gate_up.shape[1]),
            implementation=implementation,
        )
        return all_reduce(y), num_picked
    weights, experts = route(x, router, top_k, normalize=normalize)
    if real is not None:  # beyond the last expert: pairs that no block takes, and that are not counted
        experts = jnp.where(real[:, None], experts, router.shape[0])
        weights = jnp.where(real[:, None], weights, 0.0)
    if num_ranks() > 1:  # likewise pairs with other ranks' experts
        size = gate_up.shape[1]
        local = experts - first_of_rank(size)
        mine = (local >= 0) & (local < size) & (experts < router.shape[0])
        experts, weights = jnp.where(mine, local, size), jnp.where(mine, weights, 0.0)
    order = jnp.argsort(experts.reshape(-1))  # pairs (token, choice), by expert
    counts = jnp.bincount(experts.reshape(-1), length=gate_up.shape[1])
    num_picked = jnp.sum(counts > 0, dtype=jnp.int32)
    y = _expert_mlps(x[order // top_k], counts, gate_up, down, layer, act)
    y = jnp.zeros_like(y).at[order].set(y, unique_indices=True).reshape(*experts.shape, -1)
    return all_reduce(grouped_matmul.combine(y, weights, axis=1).astype(x.dtype)), num_picked


def _by_kernels(
    x: Array, gate_up: Any, down: Any, top_k: int, act: Act, implementation: paged_attention.Implementation
) -> bool:
    """Whether the implementation's kernels serve this call. Where it has some that do not, the log says once why."""
    if implementation == "xla":
        return False
    reason = grouped_matmul.unsupported(x, gate_up, down, top_k=top_k, act=act, implementation=implementation)
    if reason is not None:
        say_once("a mixture of experts", reason)
    return reason is None


def block_rows(num_rows: int, num_experts: int) -> int:
    """Rows a turn: about one expert's share, since more is wasted and less reads its weights again.

    At least 2 (one row is a slow path of XLA on CPU), at most 128 (by then the weights' traffic is hidden).
    """
    share = -(-num_rows // num_experts)
    return min(128, max(2, 1 << (share - 1).bit_length()))


def _expert_mlps(rows: Array, counts: Array, gate_up: Any, down: Any, layer: int | Array, act: Act) -> Array:
    """`mlp` of rows [R, D] that are sorted by expert; expert e owns the next `counts[e]` of them."""
    size = block_rows(rows.shape[0], counts.shape[0])
    starts = jnp.cumsum(counts) - counts
    num_blocks = -(-counts // size)
    ends = jnp.cumsum(num_blocks)  # of each expert in the list of blocks
    padded = jnp.pad(rows, ((0, size), (0, 0)))

    def turn(i: Array, y: Array) -> Array:
        e = jnp.searchsorted(ends, i, side="right")
        start = starts[e] + size * (i - (ends[e] - num_blocks[e]))
        gate_up_e, down_e = jax.tree.map(lambda w: w[layer, e], (gate_up, down))
        block = local_mlp(jax.lax.dynamic_slice_in_dim(padded, start, size), gate_up_e, down_e, act=act)
        return jax.lax.dynamic_update_slice_in_dim(y, block, start, 0)

    return jax.lax.fori_loop(0, ends[-1], turn, jnp.zeros_like(padded))[: rows.shape[0]]
