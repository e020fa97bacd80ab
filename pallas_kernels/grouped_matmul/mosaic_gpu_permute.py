"""Copies each token's row to the places where its experts expect it, on NVIDIA Hopper."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.grouped_matmul.work import Picks
from jaxserve.pallas_kernels.paged_attention.hopper import INTERPRETER, ROWS

MAX_BLOCKS = 2112  # rows that are in work at once: sixteen a multiprocessor


def permute(
    x: Array, picks: Picks, weights: Array, first_row: Array, num_rows: int, *, interpret: bool = False
) -> tuple[Array, Array, Array]:
    """`[num_rows, D]`, in which row `places[j, t]` is `x[t]`; these places, and the weights, both `[top_k, T]`.

    The place of what is no choice is a row that no tile has; nothing is copied for a token without choices.

    Args:
        weights: f32, in the order of the picks.
        first_row: i32 `[blocks, E]`, the row of the first token of a block that picks an expert.
    """
    (T, D), num_blocks, top_k = x.shape, min(x.shape[0], MAX_BLOCKS), weights.shape[0]
    return plgpu.kernel(
        functools.partial(_permute, num_blocks=num_blocks),
        out_type=(
            jax.ShapeDtypeStruct((num_rows, D), x.dtype),
            jax.ShapeDtypeStruct((top_k, T), jnp.int32),
            jax.ShapeDtypeStruct((top_k, T), jnp.float32),
        ),
        grid=(num_blocks,),
        grid_names=("block",),
        kernel_name="grouped_permute",
        interpret=INTERPRETER if interpret else None,
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),  # no thread reads what another writes
    )(x, picks.expert, picks.rank, weights, first_row)


def _permute(
    x_gmem,  # [T, D]
    expert_gmem,  # i32 [top_k, picks]
    rank_gmem,
    weights_gmem,  # f32 [top_k, picks]
    first_row_gmem,  # i32 [blocks, E]
    rows_gmem,  # [num_rows, D]
    places_gmem,  # i32 [top_k, T]
    ordered_gmem,  # f32 [top_k, T]
    *,
    num_blocks: int,
):
    (top_k, T), first, last = places_gmem.shape, lax.axis_index("block"), first_row_gmem.shape[0] - 1
    skipped = expert_gmem.shape[1] - T  # in the last block of picks, which ends with the last token

    def step(i, _):
        token = first + i * num_blocks
        block = jnp.minimum(lax.div(token, ROWS), last)
        pick = token + jnp.where(block == last, skipped, 0)
        row = load_row(x_gmem.at[token])  # while the places are looked up
        places, no_tile = [], rows_gmem.shape[0] - 1  # a row that no tile has, for what is no choice
        for j in range(top_k):
            rank = rank_gmem[j, pick]
            place = first_row_gmem[block, expert_gmem[j, pick]] + rank
            places.append(jnp.where(rank < 0, no_tile, place))

        @pl.when(places[0] < no_tile)
        def _real():
            store_row(row, [rows_gmem.at[place] for place in places])

        for j, place in enumerate(places):
            places_gmem[j, token] = place
            ordered_gmem[j, token] = weights_gmem[j, pick]

    lax.fori_loop(0, lax.div(T - first + (num_blocks - 1), num_blocks), step, None)


def load_row(source: Any) -> list[Array]:
    """A row of `[D]` in registers, for `store_row`."""
    return [source[some] for some in _pieces(source.shape[0])]


def store_row(values: list[Array], targets: list[Any]) -> None:
    """Writes a row to each of the targets, `[D]`."""
    for target in targets:
        for some, piece in zip(_pieces(target.shape[0]), values, strict=True):
            target[some] = piece


def _pieces(size: int) -> list[Any]:
    step = 1024
    return [pl.ds(begin, min(step, size - begin)) for begin in range(0, size, step)]
