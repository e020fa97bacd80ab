"""The experts of a mixture-of-experts layer, read from the stack of all layers."""

from typing import Any

from jax import Array
from jaxtyping import Bool, Float, Int

from jaxserve.pallas_kernels.grouped_matmul import mosaic_gpu, mosaic_tpu
from jaxserve.pallas_kernels.grouped_matmul.work import combine as combine
from jaxserve.pallas_kernels.paged_attention import Implementation, preferred


def fused_moe(
    x: Float[Array, "T D"],
    logits: Float[Array, "T E"],
    gate_up: Any,
    down: Any,
    layer: int | Int[Array, ""],
    *,
    top_k: int,
    normalize: bool,
    real: Bool[Array, " T"] | None = None,
    first_expert: int | Int[Array, ""] = 0,
    act: str = "silu",
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "T D"], Int[Array, ""]]:
    """`sum over the token's experts e of p_e * down_e (silu(gate_e x) * (up_e x))`, summed in float32 by choice.

    A token's experts are those of its `top_k` largest logits, and `p` the softmax of all its logits; with `normalize`,
    divided by the sum over these experts. Only experts that a token picks are read, in place; how many these are is
    the second result.

    Args:
        logits: float32, of the router.
        gate_up: `[L, E, 2 F, D]`, gate before up. down: `[L, E, D, F]`. They may hold fewer experts than there are
            logits: then the sum is over the picks of these, and only these are counted.
        layer: which of the L layers.
        first_expert: which one is the first of gate_up and down.
        real: tokens that pick experts; None = all. Others come out as zeros, as does one whose logits are no numbers.
        implementation: whose kernels; None = those for the device that programs are made for.
    Raises:
        NotImplementedError: the kernels cannot do this; the message says why.
    """
    implementation = implementation or preferred()
    if reason := unsupported(x, gate_up, down, top_k=top_k, act=act, implementation=implementation):
        raise NotImplementedError(f"fused_moe: {reason}")
    kernels = mosaic_gpu if implementation == "mosaic_gpu" else mosaic_tpu
    return kernels.fused_moe(
        x, logits, gate_up, down, layer, top_k=top_k, normalize=normalize, real=real, first_expert=first_expert
    )


def unsupported(
    x: Array, gate_up: Any, down: Any, *, top_k: int, act: str, implementation: Implementation
) -> str | None:
    """Why the implementation's kernels cannot serve this call; None if they can."""
    match implementation:
        case "mosaic_gpu":
            return mosaic_gpu.unsupported(x, gate_up, down, act)
        case "mosaic_tpu":
            return mosaic_tpu.unsupported(x, gate_up, down, act, top_k)
        case _:
            return f"there are kernels for Hopper GPUs and TPUs only, not for {implementation!r}"
