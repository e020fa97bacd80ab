"""Copies each token's row to the places where its experts expect it, on NVIDIA Hopper."""

import functools
from typing import Any

import jax
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.paged_attention.hopper import INTERPRETER

MAX_BLOCKS = 1056  # rows that are in work at once


def permute(x: Array, places: Array, num_rows: int, *, interpret: bool = False) -> Array:
    """`[num_rows, D]`, in which row `places[t, j]` is `x[t]`; rows that no place names hold anything."""
    D, num_blocks = x.shape[1], min(x.shape[0], MAX_BLOCKS)
    return plgpu.kernel(
        functools.partial(_permute, num_blocks=num_blocks),
        out_type=jax.ShapeDtypeStruct((num_rows, D), x.dtype),
        grid=(num_blocks,),
        grid_names=("block",),
        kernel_name="grouped_permute",
        interpret=INTERPRETER if interpret else None,
    )(x, places.reshape(-1))


def _permute(x_gmem, places_gmem, rows_gmem, *, num_blocks: int):
    (T, _), first = x_gmem.shape, lax.axis_index("block")

    def step(i, _):
        token, top_k = first + i * num_blocks, places_gmem.shape[0] // T
        copy_row(x_gmem.at[token], [rows_gmem.at[places_gmem[token * top_k + j]] for j in range(top_k)])

    lax.fori_loop(0, lax.div(T - first + (num_blocks - 1), num_blocks), step, None)


def copy_row(source: Any, targets: list[Any]) -> None:
    """A row of `[D]` to each of the targets, through registers."""
    step = 1024
    for begin in range(0, source.shape[0], step):
        some = pl.ds(begin, min(step, source.shape[0] - begin))
        values = source[some]
        for target in targets:
            target[some] = values
