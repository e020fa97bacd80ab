"""What every architecture shares: the configuration, the parameters outside the layers, and the `Model` itself.

An architecture is one module of this package. It says how to read its config.json (`config_from_hf`), which parameters
one layer has (`Layer`, a Flax module), what a layer computes (`layer`, a plain function over a plain dict) and what
the tensors of a checkpoint are called (`translate`). `Model` joins these and is all that the rest of jaxserve sees.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from jaxserve.layers.attention import AttentionSpec
from jaxserve.layers.decoder import Attend, Params
from jaxserve.layers.dense import PlainNorm
from jaxserve.layers.embedding import embed, unembed
from jaxserve.layers.linear import fan_in, ones, param, zeros
from jaxserve.layers.mlp import Act
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.rope import RopeScaling, rope_frequencies
from jaxserve.layers.sparse import SparseAttention
from jaxserve.sharding.heads import head_layout
from jaxserve.sharding.placement import Placement, placement
from jaxserve.sharding.rules import param_specs

LayerKind = Literal["full", "sliding"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder and the choices of its architecture. Lengths are tokens.

    Raises:
        ValueError: fields that contradict each other.
    """

    architecture: str  # the name in config.json
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    norm_offset: float = 0.0  # 1 where the checkpoint stores norm weights less one (Gemma)
    act: Act = "silu"
    tie_word_embeddings: bool = False
    embed_scale: float = 1.0

    layer_kinds: tuple[LayerKind, ...] = ()  # one a layer; () = all "full"
    sliding_window: int | None = None  # of "sliding" layers: positions that a query sees, itself included
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rope_local_theta: float | None = None  # of "sliding" layers, unscaled (Gemma 3); None = as "full" layers

    qkv_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k, before RoPE
    query_scale: float | None = None  # factor of q.k; None = head_dim ** -0.5
    attn_soft_cap: float | None = None
    final_soft_cap: float | None = None

    kv_head_copies: int = 1  # on a mesh, ranks of tp that have the same KV head, with other query heads

    num_experts: int = 0  # 0 = a dense MLP
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False  # the chosen experts' weights sum to 1

    def __post_init__(self) -> None:
        if not self.layer_kinds:
            object.__setattr__(self, "layer_kinds", ("full",) * self.num_layers)
        if len(self.layer_kinds) != self.num_layers:
            raise ValueError(f"layer_kinds must name {self.num_layers} layers, got {len(self.layer_kinds)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        if "sliding" in self.layer_kinds and self.sliding_window is None:
            raise ValueError("sliding layers need sliding_window")
        if self.num_experts and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(f"num_experts_per_tok must be in [1, {self.num_experts}], got {self.num_experts_per_tok}")

    @property
    def qkv_size(self) -> int:
        """Rows of the fused projection: q, then k, then v."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def rope(self, kind: str) -> np.ndarray:
        """Rotary frequencies of the layers of one kind, float32 [H/2]."""
        if kind == "sliding" and self.rope_local_theta is not None:
            return rope_frequencies(self.head_dim, self.rope_local_theta)
        return rope_frequencies(self.head_dim, self.rope_theta, self.rope_scaling)

    def attention_spec(self, kind: str) -> AttentionSpec:
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            scale=self.head_dim**-0.5 if self.query_scale is None else self.query_scale,
            sliding_window=self.sliding_window if kind == "sliding" else None,
            soft_cap=self.attn_soft_cap,
            frequencies=self.rope(kind),
        )


class Target(NamedTuple):
    """Where a checkpoint tensor belongs: the leaf of the parameters, and the part of a fused leaf (None = all of it).

    `part` is "q", "k" or "v" in qkv leaves, "gate" or "up" in gate_up leaves, and (expert, "gate" | "up" | "down") in
    those of experts.
    """

    path: tuple[str | int, ...]  # ("layers", 3, "qkv")
    part: str | tuple[int, str] | None = None

    def index(self, config: ModelConfig) -> tuple[int | slice, ...]:
        """The part as an index into the leaf: `leaf[target.index(config)]` has the tensor's shape."""
        if self.part is None:
            return ()
        expert, part = ((), self.part) if isinstance(self.part, str) else (self.part[:1], self.part[1])
        if part == "down":
            return expert
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        f = config.moe_intermediate_size if expert else config.intermediate_size
        start, size = {"q": (0, q), "k": (q, kv), "v": (q + kv, kv), "gate": (0, f), "up": (f, f)}[part]
        return (*expert, slice(start, start + size))


_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)")
_OUTER_NAMES = {"model.embed_tokens.weight": "embed", "model.norm.weight": "final_norm", "lm_head.weight": "lm_head"}


def translate_decoder(name: str, layer_names: Mapping[str, tuple[str, str | None]]) -> Target | None:
    """The usual `model.layers.N.*` naming, given `name inside a layer -> (leaf, part)`.

    Returns:
        None for a tensor that is ignored on purpose (old checkpoints store RoPE's frequencies).
    Raises:
        KeyError: the architecture has no such tensor.
    """
    if name in _OUTER_NAMES:
        return Target((_OUTER_NAMES[name],))
    if name.endswith("rotary_emb.inv_freq"):
        return None
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in layer_names:
        raise KeyError(name)
    leaf, part = layer_names[match[2]]
    return Target(("layers", int(match[1]), leaf), part)


class Outer(nnx.Module):
    """The parameters outside the layers."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        vocab = (config.vocab_size, config.hidden_size)
        self.embed = param(fan_in, vocab, ("vocab", "embed"), rngs=rngs, dtype=dtype)
        norm = zeros if config.norm_offset else ones
        self.final_norm = param(norm, (config.hidden_size,), ("embed",), rngs=rngs, dtype=dtype)
        if not config.tie_word_embeddings:
            self.lm_head = param(fan_in, vocab, ("vocab", "embed"), rngs=rngs, dtype=dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A configured architecture. It holds no arrays: parameters are plain pytrees, given to each call.

    `params = {"embed": [V, D], "final_norm": [D], "lm_head": [V, D] unless tied, "layers": ...}`; layers are a tuple of
    dicts here, and may be stacked by kind for an accelerator (`jaxserve.layers.decoder.stack_layers`).
    """

    config: ModelConfig
    layer_module: Callable[..., nnx.Module]  # (config, *, dtype, rngs): the parameters of one layer
    layer_fn: Callable[..., Array]  # (p, config, kind, x, attend) -> x
    translate_fn: Callable[[str], Target | None]
    plain: bool = False  # whether `layer_fn` is what `jaxserve.layers.dense` calls plain
    mesh: Mesh | None = None  # given, this is the model as each of its ranks runs it, see `on`
    sparse: SparseAttention | None = None  # which pages attention reads; None = all

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        return self.config.layer_kinds

    @property
    def plain_norm(self) -> PlainNorm | None:
        """The norms' settings if all layers are plain."""
        return PlainNorm(self.config.rms_norm_eps, self.config.norm_offset) if self.plain else None

    def attention_spec(self, kind: str) -> AttentionSpec:
        return self.config.attention_spec(kind)

    def translate(self, name: str) -> Target | None:
        """Where the checkpoint tensor `name` belongs; None if it is ignored on purpose.

        Raises:
            KeyError: the architecture has no such tensor.
        """
        target = self.translate_fn(name)
        if target == Target(("lm_head",)) and self.config.tie_word_embeddings:
            return None
        return target

    def _modules(self, dtype: DTypeLike) -> tuple[nnx.Module, nnx.Module]:
        """The abstract modules outside and inside the layers: shapes, dtypes and logical axes."""
        make = lambda module: nnx.eval_shape(lambda: module(self.config, dtype=dtype, rngs=nnx.Rngs(0)))  # noqa: E731
        return make(Outer), make(self.layer_module)

    def abstract_params(self, dtype: DTypeLike) -> dict[str, Any]:
        """The parameters as `jax.ShapeDtypeStruct`."""
        outer, layer = (_leaves(module) for module in self._modules(dtype))
        return {**outer, "layers": (layer,) * self.config.num_layers}

    def config_on(self, mesh: Mesh | AbstractMesh | None) -> ModelConfig:
        """The configuration with the counts of heads of one rank."""
        if mesh is None:
            return self.config
        heads = head_layout(self.config.num_heads, self.config.num_kv_heads, **mesh.shape)
        return dataclasses.replace(
            self.config,
            num_heads=heads.num_heads_per_rank,
            num_kv_heads=heads.num_kv_heads_per_rank,
            kv_head_copies=max(1, mesh.shape["tp"] // self.config.num_kv_heads),
        )

    def on(self, mesh: Mesh | None) -> "Model":
        """The model as each rank of the mesh runs it: its `config` counts the heads of one rank."""
        if mesh is None:
            return self
        return dataclasses.replace(self, config=self.config_on(mesh), plain=False, mesh=mesh)

    def placements(self, mesh: Mesh | AbstractMesh | None) -> dict[str, Any]:
        """The parameters' trees with the places of what `init` or a checkpoint holds as leaves."""
        c = self.config
        heads = None if mesh is None else head_layout(c.num_heads, c.num_kv_heads, **mesh.shape)

        def places(module: nnx.Module) -> dict[str, Placement]:
            if mesh is None or heads is None:
                return {name: Placement() for name in _axes(module)}
            shapes = {name: leaf.shape for name, leaf in _leaves(module).items()}
            return {name: placement(shapes[name], a, mesh, heads, c.head_dim) for name, a in _axes(module).items()}

        outer, layer = (places(module) for module in self._modules(jnp.float32))
        return {**outer, "layers": (layer,) * c.num_layers}

    def param_specs(self, params: Params) -> Any:
        """Where each leaf of `params`, in any form, is on the mesh."""
        outer, layer = (_axes(module) for module in self._modules(jnp.float32))
        return param_specs(params, {"lm_head": outer["embed"], **outer, **layer})  # an 8-bit head may not be `outer`'s

    def init(self, rng: Array, dtype: DTypeLike) -> dict[str, Any]:
        """Random parameters that keep activations finite."""
        parts = self.init_parts(rng, dtype)
        return {**next(parts), "layers": tuple(parts)}

    def init_parts(self, rng: Array, dtype: DTypeLike) -> Iterator[dict[str, Array]]:
        """What `init` gives, one after the other: the leaves outside the layers, then those of each layer."""

        def make(module: Callable[..., nnx.Module]) -> Callable[[Array], dict[str, Array]]:
            return jax.jit(lambda key: _leaves(module(self.config, dtype=dtype, rngs=nnx.Rngs(key))))

        outer_key, *keys = jax.random.split(rng, self.config.num_layers + 1)
        yield make(Outer)(outer_key)
        yield from map(make(self.layer_module), keys)

    @property
    def has_experts(self) -> bool:
        return self.config.num_experts > 0

    def embed(self, params: Params, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        return embed(token_ids, params["embed"], self.config.embed_scale)

    def layer(self, p: Params, kind: str, x: Float[Array, "T D"], attend: Attend) -> Float[Array, "T D"]:
        return self.layer_fn(p, self.config, kind, x, attend)

    def final_norm(self, params: Params, x: Float[Array, "R D"]) -> Float[Array, "R D"]:
        return rms_norm(x, params["final_norm"], self.config.rms_norm_eps, offset=self.config.norm_offset)

    def logits(self, params: Params, x: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """float32 logits of hidden states after the final norm; on a mesh those of this rank's part of V."""
        return unembed(x, params.get("lm_head", params["embed"]), self.config.final_soft_cap)


def _leaves(module: nnx.Module) -> dict[str, Any]:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def _axes(module: nnx.Module) -> dict[str, tuple[str | None, ...]]:
    return {str(path[-1]): leaf.axes for path, leaf in nnx.to_flat_state(nnx.state(module, nnx.Param))}
