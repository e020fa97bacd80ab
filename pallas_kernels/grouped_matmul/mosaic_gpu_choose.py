"""Choices of many tokens on NVIDIA Hopper: each CUDA block makes those of 64."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.grouped_matmul.mosaic_gpu_choices import NONE, Choices, by_block, by_row
from jaxserve.pallas_kernels.grouped_matmul.work import Picks
from jaxserve.pallas_kernels.paged_attention.hopper import INTERPRETER, ROWS


def choose(logits: Array, real: Array, top_k: int, *, normalize: bool, interpret: bool = False) -> tuple[Picks, Array]:
    """The choices of at least 64 tokens, those that are real, and their weights, f32 `[top_k, blocks * 64]`.

    The last block has the last 64 tokens. Those of them that the block before it has too choose nothing in it.
    """
    (T, E), num_blocks = logits.shape, -(-logits.shape[0] // ROWS)
    assert T >= ROWS, T
    ints = jax.ShapeDtypeStruct((top_k, num_blocks * ROWS), jnp.int32)
    expert, rank, weights, counts = plgpu.kernel(
        functools.partial(_choose_kernel, normalize=normalize),
        out_type=(
            ints,
            ints,
            jax.ShapeDtypeStruct(ints.shape, jnp.float32),
            jax.ShapeDtypeStruct((num_blocks, E), jnp.float32),
        ),
        scratch_types=(
            plgpu.SMEM((top_k, ROWS), jnp.int32),
            plgpu.SMEM((top_k, ROWS), jnp.int32),
            plgpu.SMEM((top_k, ROWS), jnp.float32),
            Choices.barrier(E),
            *Choices.scratch(E, top_k),
        ),
        grid=(num_blocks,),
        grid_names=("block",),
        kernel_name="grouped_choose",
        interpret=INTERPRETER if interpret else None,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(logits, by_block(real))
    return Picks(expert=expert, rank=rank, counts=counts.astype(jnp.int32)), weights


def _choose_kernel(
    logits_gmem,  # f32 [T, E]
    real_gmem,  # f32 [blocks, ROWS]
    expert_gmem,  # i32 [top_k, blocks * ROWS]
    rank_gmem,
    weights_gmem,  # f32 [top_k, blocks * ROWS]
    counts_gmem,  # f32 [blocks, E]
    expert_smem,  # i32 [top_k, ROWS]
    rank_smem,
    weights_smem,  # f32 [top_k, ROWS]
    arrived,
    *choices_smem,
    normalize: bool,
):
    choices, block = Choices(*choices_smem), lax.axis_index("block")
    begin = jnp.minimum(block * ROWS, logits_gmem.shape[0] - ROWS)
    choices.fetch(logits_gmem, begin, real_gmem.at[block], arrived)
    choices.make(arrived)
    choices.store_weights(weights_smem, normalize)
    ranks = [choices.ranks(part) for part in choices.parts]

    def store(j, _):
        rank_smem[j] = choices.own(j, ranks, -1.0)
        expert = by_row(choices.chosen_smem, j)
        expert_smem[j] = jnp.where(expert < NONE, expert, 0.0).astype(jnp.int32)

    lax.fori_loop(0, choices.top_k, store, None)
    for i, part in enumerate(choices.parts):  # the logits are done with
        choices.logits_smem[i] = choices.counts(part)
    plgpu.commit_smem()
    there = (slice(None), pl.ds(block * ROWS, ROWS))
    plgpu.copy_smem_to_gmem(expert_smem, expert_gmem.at[there])
    plgpu.copy_smem_to_gmem(rank_smem, rank_gmem.at[there])
    plgpu.copy_smem_to_gmem(weights_smem, weights_gmem.at[there])
    for i, part in enumerate(choices.parts):
        counts_smem = choices.logits_smem.at[i, pl.ds(0, 1)]
        plgpu.copy_smem_to_gmem(counts_smem, counts_gmem.at[pl.ds(block, 1), pl.ds(part, ROWS)])
    plgpu.wait_smem_to_gmem(0)
