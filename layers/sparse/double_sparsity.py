"""Double Sparsity (Yang et al., arXiv 2408.07092): tokens are scored by a few channels, which calibration has found.

Exact: beside each key a label keeps its `channels`, after rotation, which differ by layer and KV head; a token's score
is the dot product of its label with the same channels of the query; the best tokens are read. Calibration
(`jaxserve calibrate`) ranks channels by the mean of `|q k|`, of each token's query with its own key, as published
(andy-yang-1/DoubleSparse).

Ours: tokens are read by whole pages: a page's score is that of its best token, and the pages of `budget` tokens with
the best scores are read, the last one always among them. The query heads of a KV head share channels, by the mean over
them, and pages, by the sum of their scores; in the paper each has its own. Labels have the cache's dtype (in float8
bfloat16), where the paper may round them to 4 bits. Prompts are dense.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from jaxserve.layers.sparse.hooks import Layout, Policy, TokenMeta
from jaxserve.layers.sparse.top_pages import TopPages

Channels = tuple[tuple[tuple[int, ...], ...], ...]  # of each layer without a sliding window, and of each KV head there


@dataclasses.dataclass(frozen=True)
class Labels(TokenMeta):
    """Some channels of each key."""

    channels: Channels

    def width(self, head_dim: int) -> int:
        last = np.max(self.channels)
        if last >= head_dim:
            raise ValueError(f"channels must be among the head's {head_dim}, got {last}; give those of this model")
        return len(self.channels[0][0])

    def in_layer(self, layer: int | Int[Array, ""]) -> "LayerLabels":
        return LayerLabels(jnp.asarray(self.channels, jnp.int32)[layer])

    def of_keys(self, k: Float[Array, "T K H"]) -> Float[Array, "T K width"]:
        raise AssertionError("channels are those of a layer: ask in_layer")

    def probe(self, q: Float[Array, "T K G H"]) -> Float[Array, "T K width"]:
        raise AssertionError("channels are those of a layer: ask in_layer")


@dataclasses.dataclass(frozen=True)
class LayerLabels(TokenMeta):
    """Those of one layer."""

    channels: Array  # i32 [K, width]

    def width(self, head_dim: int) -> int:
        return self.channels.shape[1]

    def of_keys(self, k: Float[Array, "T K H"]) -> Float[Array, "T K width"]:
        return jnp.take_along_axis(k, self._of_heads(k.shape[1]), axis=2)

    def probe(self, q: Float[Array, "T K G H"]) -> Float[Array, "T K width"]:
        return jnp.take_along_axis(jnp.sum(q.astype(jnp.float32), axis=2), self._of_heads(q.shape[1]), axis=2)

    def _of_heads(self, num_kv_heads: int) -> Int[Array, "1 K width"]:
        """Of heads that only fill up the cache too: theirs do not matter."""
        return jnp.pad(self.channels, ((0, num_kv_heads - self.channels.shape[0]), (0, 0)))[None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoubleSparsity(Policy):
    """The pages with the best tokens, by some of their channels. For answers."""

    budget: int = 2048  # tokens that a row reads in each layer and KV head
    channels: Channels = ()  # from `jaxserve calibrate`, for each layer and KV head as many

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _are_channels(self.channels):
            raise ValueError(
                f"channels of {self.name} must be at least 1 for each layer and KV head, and for all as many; give "
                f"what jaxserve calibrate writes, got {str(self.channels)[:80]}"
            )

    @property
    def page_meta(self) -> Labels:
        return Labels(self.channels)

    @property
    def select(self) -> TopPages:
        return TopPages(budget=self.budget)

    def check(self, page_size: int, layout: Layout) -> None:
        super().check(page_size, layout)
        if layout.tensor_parallel_size > 1:
            raise ValueError(f"{self.name} needs tensor_parallel_size 1; raise kv_parallel_size instead")
        expected = (layout.layer_kinds.count("full"), layout.num_kv_heads)
        found = (len(self.channels), len(self.channels[0]))
        if found != expected:
            raise ValueError(
                f"channels of {self.name} must be of this model's {expected[0]} layers and {expected[1]} KV heads, got "
                f"{found[0]} and {found[1]}; run jaxserve calibrate with this model"
            )


def _are_channels(value: object) -> bool:
    try:
        found = np.asarray(value)
    except ValueError:  # not as many for all
        return False
    return found.ndim == 3 and found.size > 0 and found.dtype.kind == "i" and bool((found >= 0).all())
