"""`x @ w.T`, in the form that each backend runs fastest."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Num


def contract(x: Num[Array, "T in"], w: Num[Array, "out in"], out_dtype: DTypeLike) -> Num[Array, "T out"]:
    """Products of the rows of x with the rows of w, as `out_dtype`; on CPU summed in float32 (integers: in that)."""
    few = outputs_first(x.shape[0], w.shape[0], w.shape[1], w.dtype.itemsize)
    on_cpu = functools.partial(_by_outputs if few else _by_rows, accumulator=_accumulator(out_dtype))
    # An accelerator's matmul rounds its own sums; asked for float32 it would write twice the bytes
    return jax.lax.platform_dependent(
        x,
        w,
        cpu=lambda x, w: on_cpu(x, w).astype(out_dtype),
        default=functools.partial(_by_rows, accumulator=out_dtype),
    )


def _accumulator(out_dtype: DTypeLike) -> DTypeLike:
    return jnp.float32 if jnp.issubdtype(out_dtype, jnp.floating) else out_dtype


def outputs_first(num_rows: int, num_outputs: int, num_inputs: int, itemsize: int) -> bool:
    """Whether XLA's CPU matmul is faster as `(w @ x.T).T`.

    It repacks its right-hand operand at every call; with few rows in x that had better be x than the weight. Time
    against the other form, on Zen 4 at 2 to 32 rows: float32 0.3 to 0.75 everywhere; 8 bits 0.65 to 0.9, but 1.1 to 1.8
    from 8,192 outputs; 16 bits 0.7 to 0.9, but 1.6 with few inputs.
    """
    if itemsize == 4:
        return num_rows <= 64
    if itemsize == 2:
        return num_rows <= 64 and num_inputs >= 1024
    return num_rows <= 32 and num_outputs < 8192


def _by_rows(x: Array, w: Array, *, accumulator: DTypeLike) -> Array:
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=accumulator)


def _by_outputs(x: Array, w: Array, *, accumulator: DTypeLike) -> Array:
    y = jax.lax.dot_general(w, x, (((1,), (1,)), ((), ())), preferred_element_type=accumulator)
    return jax.lax.optimization_barrier(y).T  # without the barrier XLA turns this back into the other form
