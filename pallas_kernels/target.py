"""The device that programs are made for."""

from typing import Any

import jax
from jax import Array


def target_device() -> Any:
    """What `jax.default_device` says, be it a device of a topology that is not here; else the first device here."""
    chosen = jax.config.jax_default_device
    return chosen if hasattr(chosen, "platform") else jax.devices(chosen)[0]


def kept_apart(product: Array) -> Array:
    """The result of a matmul, about to get another shape.

    XLA for TPU would give that shape to the weights, and copy a layer's out of the stack for it; so that on a TPU there
    is a barrier between.
    """
    return jax.lax.optimization_barrier(product) if target_device().platform == "tpu" else product


def layers_a_turn() -> int:
    """How many layers a turn of the loop over layers should take.

    On TPU one: of eight, XLA copies projections out of the stack, each layer's, before it multiplies by them, and a
    compile takes four times as long (Llama-3.1-8B for a v6e).
    """
    return 1 if target_device().platform == "tpu" else 8
