"""The parts of a layer that architectures share: their parameters, named in one place, and what they compute.

An architecture's `Layer` calls the `*_params` functions for the parts it has; its `layer` joins them.
"""

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from jaxserve.layers.attention import project_qkv
from jaxserve.layers.decoder import Attend, Params
from jaxserve.layers.linear import fan_in, linear, ones, param, zeros
from jaxserve.layers.norm import rms_norm
from jaxserve.models.base import ModelConfig
from jaxserve.sharding.collectives import all_reduce


def norm_params(module: nnx.Module, config: ModelConfig, names: tuple[str, ...], size: int, **how) -> None:
    """One RMSNorm weight [size] for each name, never split over devices, initialised to multiply by 1."""
    init = zeros if config.norm_offset else ones
    _assign(module, **{name: param(init, (size,), (None,), **how) for name in names})


def attention_params(module: nnx.Module, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
    """What `self_attention` reads."""
    c = config
    how = {"rngs": rngs, "dtype": dtype}
    _assign(module, qkv=param(fan_in, (c.qkv_size, c.hidden_size), ("qkv", "embed"), **how))
    if c.qkv_bias:
        _assign(module, qkv_bias=param(zeros, (c.qkv_size,), ("qkv",), **how))
    if c.qk_norm:
        norm_params(module, c, ("q_norm", "k_norm"), c.head_dim, **how)
    _assign(module, o=param(fan_in, (c.hidden_size, c.num_heads * c.head_dim), ("embed", "heads"), **how))


def mlp_params(module: nnx.Module, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
    """What `jaxserve.layers.mlp.mlp` reads."""
    d, f = config.hidden_size, config.intermediate_size
    how = {"rngs": rngs, "dtype": dtype}
    _assign(module, gate_up=param(fan_in, (2 * f, d), ("gate_up", "embed"), **how))
    _assign(module, down=param(fan_in, (d, f), ("embed", "mlp"), **how))


def _assign(module: nnx.Module, **params: nnx.Param) -> None:
    for name, value in params.items():
        setattr(module, name, value)


def norm(x: Float[Array, "*rows D"], w: Float[Array, "*last D"], config: ModelConfig) -> Float[Array, "*rows D"]:
    """RMSNorm as the model's configuration has it."""
    return rms_norm(x, w, config.rms_norm_eps, offset=config.norm_offset)


def self_attention(p: Params, config: ModelConfig, kind: str, x: Float[Array, "T D"], attend: Attend) -> Array:
    """Projections, optional q and k norms, RoPE, attention and output projection of one layer: [T, D]."""
    heads = project_qkv(x, p["qkv"], p.get("qkv_bias"), config.head_dim)
    if config.qk_norm:
        heads = _norm_q_and_k(heads, p["q_norm"], p["k_norm"], config)
    out = attend(heads)
    return all_reduce(linear(out.reshape(out.shape[0], -1), p["o"]))


def _norm_q_and_k(heads: Array, q_norm: Array, k_norm: Array, config: ModelConfig) -> Array:
    """Heads of q, k and v [T, N + 2 K, H], those of q and k after their norms.

    All are normed, and those of v then are not taken: an accelerator does it in one kernel, where parts take four.
    """
    head = jnp.arange(heads.shape[1])[:, None]
    w = jnp.where(head < config.num_heads, q_norm[None], k_norm[None])
    return jnp.where(head[None] < config.num_heads + config.num_kv_heads, norm(heads, w, config), heads)
