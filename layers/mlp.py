"""The gated feed-forward block."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxserve.layers.linear import Weight, linear
from jaxserve.sharding.collectives import all_reduce

Act = Literal["silu", "gelu_tanh"]


def gate(gate_up: Float[Array, "*rows F2"], act: Act) -> Float[Array, "*rows F"]:
    """`act(first half) * second half`; the activation in float32."""
    g, u = jnp.split(gate_up, 2, axis=-1)
    g32 = g.astype(jnp.float32)
    activated = jax.nn.silu(g32) if act == "silu" else jax.nn.gelu(g32, approximate=True)
    return activated.astype(u.dtype) * u


def mlp(x: Float[Array, "T D"], gate_up: Weight, down: Weight, *, act: Act) -> Float[Array, "T D"]:
    """`down(act(gate(x)) * up(x))` with gate and up fused in one weight [2F, D]; down is [D, F]."""
    return all_reduce(local_mlp(x, gate_up, down, act=act))


def local_mlp(x: Float[Array, "T D"], gate_up: Weight, down: Weight, *, act: Act) -> Float[Array, "T D"]:
    """What this rank's part of F adds to `mlp`; without a mesh all of it."""
    return linear(gate(linear(x, gate_up), act), down)
