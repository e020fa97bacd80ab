"""The experts of one layer on TPU: which rows are whose, with which tilings the kernel runs, and what it cannot do."""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels import tpu
from jaxserve.pallas_kernels.grouped_matmul import mosaic_tpu_combine, mosaic_tpu_kernel as kernel
from jaxserve.pallas_kernels.grouped_matmul.mosaic_tpu_kernel import UNIT, Scalars, Tiling
from jaxserve.pallas_kernels.grouped_matmul.mosaic_tpu_rows import LANES, word_rows
from jaxserve.pallas_kernels.grouped_matmul.work import Picks, Work, choices, picks_of, plan

MAX_PAIRS = 128 * 1024  # (token, choice) pairs: their tokens fill half of the scalar memory of a TPU


def unsupported(x: Array, gate_up: Any, down: Any, act: str, top_k: int) -> str | None:
    """Why the kernel cannot serve this call; None if it can."""
    if not (hasattr(gate_up, "dtype") and hasattr(down, "dtype")):
        return "the experts' weights are quantised"
    if {x.dtype, gate_up.dtype, down.dtype} != {jnp.dtype(jnp.bfloat16)}:
        return f"rows and weights must be bfloat16, got {x.dtype}, {gate_up.dtype}, {down.dtype}"
    if act != "silu":
        return f"the activation must be silu, got {act}"
    D, F = down.shape[-2:]
    if D % 256 or F % 128:
        return f"the model's dimension must be a multiple of 256 and the experts' of 128, got {D} and {F}"
    if (pairs := x.shape[0] * top_k) > MAX_PAIRS:
        return f"a step may have {MAX_PAIRS} choices of experts, got {pairs}"
    return None


def fused_moe(
    x: Array,
    logits: Array,
    gate_up: Array,
    down: Array,
    layer: int | Array,
    *,
    top_k: int,
    normalize: bool,
    real: Array | None = None,
    first_expert: int | Array = 0,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """See the package's `fused_moe`."""
    (T, D), (_, E, _, F) = x.shape, down.shape
    sizes = tiling(T, top_k, logits.shape[1], D, F, tpu.chip())
    weights, chosen = choices(logits, top_k, normalize)
    local = chosen - first_expert
    here = (local >= 0) & (local < E)
    if real is not None:
        here &= real[:, None]
    local = jnp.where(here, local, E)  # which is no expert
    picks = picks_of(local, E)
    work, first_row = plan(picks, T * top_k, sizes.rows, unit=sizes.rows)
    scalars = scalars_of(layer, local, picks, work, first_row, sizes, blocks=F // sizes.columns)
    rows = kernel.experts(x, gate_up, down, scalars, jnp.maximum(work.num_tiles[0], 1), sizes, interpret=interpret)
    places = jnp.where(here, picks.rank.T + _of_expert(first_row[0], local), -1)
    y = mosaic_tpu_combine.combine(rows, places, jnp.where(here, weights, 0.0), D, interpret=interpret)
    return y, work.num_experts


def _of_expert(values: Array, experts: Array) -> Array:
    """`values[experts]`, 0 where there is no such expert. A TPU compares thousands of numbers while it looks one up."""
    ids = jnp.arange(values.shape[0], dtype=jnp.int32)
    return jnp.sum(jnp.where(experts[:, :, None] == ids[None, None], values[None, None], 0), axis=2)


def scalars_of(
    layer: int | Array, experts: Array, picks: Picks, work: Work, first_row: Array, sizes: Tiling, *, blocks: int
) -> Scalars:
    """What the kernel walks over; `experts` are those of each token, `[T, top_k]`."""
    T, counts, tiles = experts.shape[0], picks.counts[0], jnp.arange(work.expert.shape[0], dtype=jnp.int32)
    pairs = jnp.sort((experts * T + jnp.arange(T, dtype=jnp.int32)[:, None]).reshape(-1))  # by expert, then by token
    ids, is_visited = jnp.arange(counts.shape[0], dtype=jnp.int32), counts > 0
    # Sums of the few before each one: an operation, where a cumulative sum or a sort takes several
    pairs_before, visited_before = (
        jnp.sum(jnp.where(ids[None] < ids[:, None], x[None], 0), axis=1) for x in (counts, is_visited.astype(jnp.int32))
    )
    if blocks == 1:
        in_turn = is_visited[None] & (visited_before[None] == ids[:, None])  # [turn, E]
        visited, num_fetches = jnp.sum(jnp.where(in_turn, ids[None], 0), axis=1), work.num_experts
        fetches = visited_before[work.expert]
    else:
        visited, num_fetches, fetches = work.expert, work.num_tiles * blocks, tiles
    return Scalars(
        layer=jnp.asarray(layer, jnp.int32).reshape(1),
        num_fetches=num_fetches.reshape(1),
        experts=visited,
        fetches=fetches,
        first=(pairs_before - first_row[0])[work.expert] + tiles * sizes.rows,
        num_rows=work.num_rows,
        tokens=jnp.pad(pairs % T, (0, UNIT)),
    )


def tiling(num_tokens: int, top_k: int, num_experts: int, D: int, F: int, info: pltpu.TpuInfo) -> Tiling:
    """The tiling for so many tokens, which choose among all the experts of a layer.

    Weights: if two experts fit half of the vector memory (Qwen3-30B-A3B's have 9.4 MB; v5e and v6e have 128 MiB, v5p
    and 7x 64), an expert is one fetch, and is read once, however many tiles it has. Else (Mixtral's have 352 MB) each
    tile reads it in blocks, of which two may take a quarter: rows need the memory more.

    Rows: an expert without many has one tile, twice as large as it is on average, and its weights take longer to come
    than the matrix unit is busy (16 rows of Qwen3-30B-A3B on a v6e: 5.8 us, and 2,800 instructions). With many, a tile
    of as many rows as the matrix unit has (128 or 256) takes as long as the push of the weights that it meets, which
    happens meanwhile; more would only add rows that are nobody's. If each tile reads the weights, it needs as many rows
    as keep the matrix unit busy meanwhile: a row is `6 D F` operations, an expert `6 D F` bytes, so the operations that
    the chip does while a byte comes (240 on a v5e, 166 on a v5p, 561 on a v6e, 312 on a 7x), or what the memory allows.
    They pass the matrix unit by as many as it has, and those that are nobody's do not.
    """
    limit = info.vmem_capacity_bytes * 7 // 8  # the compiler needs some too
    whole = _weights_bytes(F, D) <= limit // 2
    widths = [n for n in range(128, F + 1, 128) if F % n == 0 and _weights_bytes(n, D) <= limit // 4]
    columns = F if whole else max(widths, default=128)
    side = info.mxu_column_size
    most, mean = side, max(1.0, num_tokens * top_k / num_experts)
    if not whole:
        most *= math.ceil(info.bf16_ops_per_second / info.mem_bw_bytes_per_second / side)

    def sizes_with(most: int) -> Tiling:
        rows = min(most, max(UNIT, 1 << math.ceil(math.log2(2 * mean))))
        return Tiling(rows=rows, pass_rows=min(rows, side), columns=columns, vmem_bytes=limit)

    fitting = (sizes_with(n) for n in range(most, side, -side))
    return next((sizes for sizes in fitting if vmem_bytes(sizes, D, F) <= limit), sizes_with(side))


def vmem_bytes(sizes: Tiling, D: int, F: int) -> int:
    """Of vector memory that the kernel takes: its buffers, two of each, and what is between its matmuls."""
    row = 2 * 2 * word_rows(D) * LANES * 4 + 2 * D + (4 * D if sizes.columns < F else 0)
    return _weights_bytes(sizes.columns, D) + sizes.rows * row + sizes.pass_rows * (10 * sizes.columns + 4 * D)


def _weights_bytes(columns: int, D: int) -> int:
    """Of two fetches."""
    return 2 * 3 * columns * D * 2
