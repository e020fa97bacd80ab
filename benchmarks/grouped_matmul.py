"""The experts of Qwen3-30B-A3B's layers on one Hopper GPU: 128 experts of [2048, 2 x 768] and [768, 2048], bfloat16.

    grouped_matmul_N_rows   the first matmul and its activation alone, N rows for each expert: TB/s of weights, from
                            512 rows TFLOP/s; the peers are JAX's ragged_dot_mgpu, and XLA's matmul of 8192^3
    grouped_moe_T_tokens    a whole layer with its router for T tokens, top 8: microseconds at one token, then TB/s of
                            the weights of the experts that were picked, from 8,192 tokens TFLOP/s
    grouped_moe_T_of_B      the same where only T of B rows are real: the others are padding, and read nothing
    grouped_moe_T_skewed    the same where a tenth of the experts gets most of the tokens

Layers follow each other as in a model, each with weights of its own, in one XLA program.

    python -m benchmarks.grouped_matmul [--save DIR]
"""

import argparse
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks._report import Row, report
from benchmarks.paged_attention import timed
from jaxserve.layers.linear import fan_in
from jaxserve.layers.moe import moe
from jaxserve.pallas_kernels.grouped_matmul import mosaic_gpu
from jaxserve.pallas_kernels.grouped_matmul.mosaic_gpu_matmul import grouped_matmul
from jaxserve.pallas_kernels.grouped_matmul.work import max_rows, picks_of, plan

LAYERS, E, D, F, TOP_K = 8, 128, 2048, 768, 8
EXPERT_BYTES = 3 * D * F * 2
FIXED_US = 4.0  # beside the time of reading what one token needs, at `READ_TB_S`
READ_TB_S = 4.2
CALLS = 48


def weights() -> dict[str, Array]:
    shapes = {"router": (LAYERS, E, D), "gate_up": (LAYERS, E, 2 * F, D), "down": (LAYERS, E, D, F)}
    make = jax.jit(fan_in, static_argnums=(1, 2))
    return {name: make(jax.random.key(i), shape, jnp.bfloat16) for i, (name, shape) in enumerate(shapes.items())}


def skewed(p: dict[str, Array]) -> dict[str, Array]:
    """The same with a router that prefers a tenth of the experts."""
    scale = jnp.where(jnp.arange(E) < E // 10, 3.0, 1.0).astype(jnp.bfloat16)
    return {**p, "router": p["router"] * scale[None, :, None]}


@jax.jit
def run_layers(x: Array, real: Array, p: dict[str, Array], layers: Array) -> tuple[Array, Array]:
    """The rows behind all these layers, and the number of experts read."""

    def body(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        x, experts_read = carry
        layer = jax.lax.dynamic_index_in_dim(layers, i, keepdims=False)
        router = jax.lax.dynamic_index_in_dim(p["router"], i % LAYERS, keepdims=False)
        how = {"top_k": TOP_K, "normalize": True, "act": "silu", "layer": layer, "real": real}
        out, num_experts = moe(x, router, p["gate_up"], p["down"], **how)
        return x + out, experts_read + num_experts

    return jax.lax.fori_loop(0, CALLS, body, (x, jnp.int32(0)), unroll=8)


def moe_row(num_tokens: int, p: dict[str, Array], *, skew: bool = False, rows: int = 0) -> Row:
    """With `rows`, of which the tokens are the first."""
    x = jax.random.normal(jax.random.key(9), (rows or num_tokens, D), jnp.bfloat16)
    real = jnp.arange(x.shape[0]) < num_tokens
    layers = jnp.arange(CALLS, dtype=jnp.int32) % LAYERS
    num_experts = float(run_layers(x, real, p, layers)[1]) / CALLS
    seconds = timed(lambda: run_layers(x, real, p, layers), jax.block_until_ready) / CALLS
    name = f"grouped_moe_{num_tokens}_{'skewed' if skew else f'of_{rows}' if rows else 'tokens'}"
    num_bytes, flops = num_experts * EXPERT_BYTES, num_tokens * TOP_K * EXPERT_BYTES
    if num_tokens == 1:
        most = 1e6 * num_bytes / (READ_TB_S * 1e12) + FIXED_US
        return Row(name=name, value=1e6 * seconds, unit="us", target=most, lower_is_better=True)
    if num_tokens >= 8192:
        return Row(name=name, value=flops / seconds / 1e12, unit="TFLOP/s", target=500 if skew else 550)
    return Row(name=name, value=num_bytes / seconds / 1e12, unit="TB/s", target=4.0 if num_tokens == 64 else 3.5)


MATMULS = {1: (3.77, 3.6, 3.8), 8: (3.59, 3.5, 3.8), 64: (2.73, 3.2, 3.5), 512: (715.0, 500.0, 600.0)}


def matmul_row(rows: int, p: dict[str, Array]) -> Row:
    """Every expert gets as many rows."""
    peer, must, stretch = MATMULS[rows]
    num_tokens = rows * E // TOP_K
    experts = (np.arange(num_tokens)[:, None] * TOP_K + np.arange(TOP_K)) % E
    tiling, _ = mosaic_gpu.tilings(num_tokens, TOP_K, E, D, F)
    work, _ = plan(picks_of(jnp.asarray(experts, jnp.int32), E), num_tokens * TOP_K, tiling.tile_rows)
    x = jax.random.normal(jax.random.key(9), (max_rows(num_tokens * TOP_K, E), D), jnp.bfloat16)

    @jax.jit
    def run(x: Array, stack: Array, layers: Array) -> Array:
        def body(i: Array, layer: Array) -> Array:
            out = grouped_matmul(x, stack, layer, work, tiling, gated=True)
            return layers[i] + (out[0, 0] > 1e30).astype(jnp.int32)  # no call can be left out

        return jax.lax.fori_loop(0, CALLS, body, layers[0], unroll=8)

    layers = jnp.arange(CALLS, dtype=jnp.int32) % LAYERS
    seconds = timed(lambda: run(x, p["gate_up"], layers), jax.block_until_ready) / CALLS
    name, num_bytes = f"grouped_matmul_{rows}_rows", E * 2 * F * D * 2
    value, unit = (rows * num_bytes, "TFLOP/s") if rows == 512 else (num_bytes, "TB/s")
    goals = {"peer": peer, "target": must / peer, "stretch": stretch / peer}
    return Row(name=name, value=value / seconds / 1e12, unit=unit, **goals)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, help="folder for the rows as grouped_matmul.jsonl")
    save = parser.parse_args().save
    p = weights()
    measures = [functools.partial(matmul_row, num_rows, p) for num_rows in MATMULS]
    measures += [functools.partial(moe_row, num_tokens, p) for num_tokens in (1, 8, 64, 1024, 8192)]
    measures += [functools.partial(moe_row, num_tokens, p, rows=rows) for num_tokens, rows in ((1, 8), (16, 272))]
    measures += [functools.partial(moe_row, num_tokens, skewed(p), skew=True) for num_tokens in (64, 8192)]
    rows = []
    for measure in measures:
        rows.append(measure())
        print(rows[-1].as_dict(), flush=True)
    report(rows, save=save and save / "grouped_matmul.jsonl")


if __name__ == "__main__":
    main()
