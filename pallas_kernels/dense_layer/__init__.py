"""The matmuls, norms and activation from the attention of one layer to that of the next, for few rows."""

from typing import Any, NamedTuple

from jax import Array
from jaxtyping import Float, Int

from jaxserve.pallas_kernels.dense_layer import mosaic_gpu
from jaxserve.pallas_kernels.dense_layer.cuts import fits_rows as fits_rows


class DenseWeights(NamedTuple):
    """Of all layers of one kind, `[L, ...]` each."""

    input_norm: Float[Array, "L D"]
    qkv: Float[Array, "L QKV D"]
    o: Float[Array, "L D NH"]
    post_norm: Float[Array, "L D"]
    gate_up: Float[Array, "L F2 D"]
    down: Float[Array, "L D F"]


def unsupported(weights: Any, num_rows: int) -> str | None:
    """Why the kernel cannot serve these weights, or so many rows; None if it can."""
    return mosaic_gpu.unsupported(weights, num_rows)


def dense_layer(
    attended: Float[Array, "R NH"],
    x: Float[Array, "R D"],
    weights: DenseWeights,
    layer: Int[Array, ""],
    progress: Int[Array, " 2"],
    *,
    eps: float,
    offset: float,
    interpret: bool = False,
) -> tuple[Float[Array, "R D"], Float[Array, "R QKV"], Int[Array, " 2"]]:
    """The residual stream after `layer`, the queries, keys and values of the layer after it, and progress.

    With `norm(x, w) = x / sqrt(mean(x^2) + eps) * (offset + w)`:

        h = x + attended @ o.T
        gate, up = split(norm(h, post_norm) @ gate_up.T)
        y = h + (silu(gate) * up) @ down.T
        heads = norm(y, input_norm of the next layer) @ qkv.T of the next layer

    After the last layer of the stack `heads` means nothing.

    Args:
        attended: output of the layer's attention.
        x: the residual stream before it.
        progress: zeros at first, then what the call before returned: counts of finished steps, by which blocks wait.
    """
    return mosaic_gpu.dense_layer(attended, x, weights, layer, progress, eps=eps, offset=offset, interpret=interpret)
