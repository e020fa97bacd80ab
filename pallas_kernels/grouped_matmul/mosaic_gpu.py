"""The experts of one layer on NVIDIA Hopper: with which tilings the kernels run, and what they cannot do."""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxserve.pallas_kernels.grouped_matmul.mosaic_gpu_choose import choose
from jaxserve.pallas_kernels.grouped_matmul.mosaic_gpu_matmul import grouped_matmul
from jaxserve.pallas_kernels.grouped_matmul.mosaic_gpu_matmul_cta import Tiling
from jaxserve.pallas_kernels.grouped_matmul.mosaic_gpu_permute import permute
from jaxserve.pallas_kernels.grouped_matmul.mosaic_gpu_route import route_and_permute
from jaxserve.pallas_kernels.grouped_matmul.work import Picks, choices, combine, max_rows, picks_of, plan
from jaxserve.pallas_kernels.paged_attention.hopper import ROWS, SHARED_MEMORY_BYTES
from jaxserve.pallas_kernels.paged_attention.mosaic_gpu import num_multiprocessors

MANY = 32  # rows an expert, on average, from which some have more than one warpgroup takes


def unsupported(x: Array, gate_up: Any, down: Any, act: str) -> str | None:
    """Why the kernels cannot serve this call; None if they can."""
    if not (hasattr(gate_up, "dtype") and hasattr(down, "dtype")):
        return "the experts' weights are quantised"
    if x.dtype not in ("bfloat16", "float16") or {gate_up.dtype, down.dtype} != {x.dtype}:
        return f"rows and weights must all be bfloat16 or all float16, got {x.dtype}, {gate_up.dtype}, {down.dtype}"
    if act != "silu":
        return f"the activation must be silu, got {act}"
    D, F = down.shape[-2:]
    if D % 128 or F % 64:
        return f"the model's dimension must be a multiple of 128 and the experts' of 64, got {D} and {F}"
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
    interpret: bool = False,
) -> tuple[Array, Array]:
    """See the package's `fused_moe`."""
    (T, D), (_, E, _, F) = x.shape, down.shape
    up, across = tilings(T, top_k, E, D, F)
    real = jnp.ones(T, bool) if real is None else real
    how, by_kernels = {"normalize": normalize, "interpret": interpret}, by_kernel(E, top_k)
    are_some = logits.shape[1] > E  # the others are another device's
    if by_kernels and T <= ROWS and not are_some:
        rows, work, places, weights = route_and_permute(x, logits, real, gate_up, layer, top_k, up, **how)
    else:
        if are_some:
            picks, weights = route_some(logits, real, top_k, normalize, first_expert, E)
        elif by_kernels:
            picks, weights = choose(logits, real, top_k, **how)
        else:
            picks, weights = route(logits, real, top_k, normalize)
        work, first_row = plan(picks, T * top_k, up.tile_rows)
        num_rows = max_rows(T * top_k, E)
        rows, places, weights = permute(x, picks, weights, first_row, num_rows, interpret=interpret)
    rows = grouped_matmul(rows, gate_up, layer, work, up, gated=True, following=(down, across), interpret=interpret)
    rows = grouped_matmul(rows, down, layer, work, across, gated=False, interpret=interpret)
    return combine(rows[places], weights, axis=0).astype(x.dtype), work.num_experts


def by_kernel(num_experts: int, top_k: int) -> bool:
    """Whether a kernel makes the choices, which keeps what it knows of the experts in one warpgroup."""
    return num_experts in (64, 128) and top_k <= 16


def route(logits: Array, real: Array, top_k: int, normalize: bool) -> tuple[Picks, Array]:
    """The picks of the `top_k` largest logits of each real token, and their weights, `[top_k, T]`, in plain XLA."""
    weights, experts = choices(logits, top_k, normalize)
    return picks_of(experts, logits.shape[1], real), jnp.where(real[None], weights.T, 0.0)


def route_some(
    logits: Array, real: Array, top_k: int, normalize: bool, first: int | Array, size: int
) -> tuple[Picks, Array]:
    """As `route`, of the experts `[first, first + size)` alone; the picks count from the first of them.

    A pick of another expert has no weight and repeats one that counts: a token's row is copied once more to a place
    where it lies already. A token that picks none of these experts is as one that is not real.
    """
    weights, experts = choices(logits, top_k, normalize)
    local = experts - first
    here = (local >= 0) & (local < size) & real[:, None]
    one_here = jnp.take_along_axis(local, jnp.argmax(here, axis=1, keepdims=True), axis=1)
    some = jnp.any(here, axis=1)
    picks = picks_of(jnp.where(here, local, jnp.where(some[:, None], one_here, 0)), size, some)
    return picks, jnp.where(here, weights, 0.0).T


def tilings(num_tokens: int, top_k: int, num_experts: int, D: int, F: int) -> tuple[Tiling, Tiling]:
    """Those of the two matmuls, which share the tiles of rows."""
    how = (num_tokens, top_k, num_experts)
    return tiling(*how, depth=D, width=F, parts=2), tiling(*how, depth=F, width=D, parts=1)


def tiling(num_tokens: int, top_k: int, num_experts: int, *, depth: int, width: int, parts: int) -> Tiling:
    """The tiling of a matmul with `parts` weights of `width` outputs, sums over `depth`.

    Many rows: the tensor cores are the limit, and the largest unit whose sums fit the registers reuses most. Few: the
    weights' traffic is, and what counts is that all multiprocessors are done at the same time; beside the weights, a
    unit costs its rows and a fixed time, together about those of 16 columns.
    """
    multiprocessors = num_multiprocessors()
    warpgroups = 2 if num_tokens * top_k > MANY * num_experts else 1
    choices = [c for c in range(16, 256 // parts + 1, 16) if width % c == 0]
    visited = num_experts * (1.0 - (1.0 - top_k / num_experts) ** num_tokens)  # on average, if all are equally likely

    def cost(columns: int) -> float:
        return math.ceil(visited * width / columns / multiprocessors - 1e-6) * (parts * columns + 16)

    columns = choices[-1] if warpgroups == 2 else min(choices, key=cost)
    block = 128 if warpgroups == 1 and depth % 128 == 0 and parts * columns <= 128 else 64
    spare = SHARED_MEMORY_BYTES - warpgroups * 2 * ROWS * 64 * 2
    stages = spare // ((warpgroups * ROWS + parts * columns) * block * 2)
    return Tiling(warpgroups=warpgroups, columns=columns, block=block, stages=stages, multiprocessors=multiprocessors)
