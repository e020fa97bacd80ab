"""Kascade (Deshmukh et al., arXiv 2512.16391): a few anchor layers choose, the layers after each read what it chose.

Exact (microsoft/kascade): in an anchor layer the softmax of exact scores is summed over the query heads of a KV head,
and the largest are read, of `percent` of the context and at least `least` tokens; the first layer reads all, and only
chooses for others; a KV head of another layer reads what one of the last anchor's heads chose, which `heads` names.
`jaxserve calibrate` finds anchors and heads as published: the similarity of two layers' heads is the least share, over
the rows of a text, that the pages one chose have in the mass of those the other would choose; weighted by how much
attention changes a layer's input (one less the cosine), the anchors are those with the largest sum, by dynamic
programming.

Ours: what is chosen are pages, by the mass of their tokens, as many as hold the tokens; the row's own page is always
one, as is the paper's own tile. Each row of a prompt chooses by itself, where the paper sums over tiles of 32 rows, so
that steps change nothing. Models with sliding windows are refused. A selection lives for a step, so prompts must pass
all layers in one: prefill must be chunked.
"""

import dataclasses
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jaxserve.layers.sparse.hooks import ALL_PAGES, Layout, Part, Policy, Select
from jaxserve.layers.sparse.selection import ascending


@dataclasses.dataclass(frozen=True, kw_only=True)
class LargestMass(Select):
    """The pages that hold `percent` of the positions, at least `least`: the last one, and those of the largest mass."""

    percent: int
    least: int

    def max_pages(self, page_size: int) -> int:
        return ALL_PAGES

    def num_pages(self, kv_lens: Int[Array, " T"], page_size: int) -> Int[Array, " T"]:
        """Of rows that see so many positions, if there are as many."""
        return jnp.maximum(-(-jnp.maximum(kv_lens * self.percent // 100, self.least) // page_size), 1)

    def pages(
        self,
        kv_lens: Int[Array, " T"],
        page_size: int,
        scores: Float[Array, "T K max_pages"] | None,
        layer: int | Int[Array, ""],
    ) -> Int[Array, "T K C"]:
        assert scores is not None
        number = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2)
        last = (kv_lens[:, None, None] - 1) // page_size
        rank = jnp.where(number == last, jnp.inf, jnp.where(number < last, scores, -jnp.inf))
        best, numbers = jax.lax.top_k(rank, self.most(page_size, scores.shape[2]))
        is_chosen = number[..., : best.shape[2]] < self.num_pages(kv_lens, page_size)[:, None, None]
        return ascending(numbers, is_chosen & (best > -jnp.inf))

    def most(self, page_size: int, max_pages: int) -> int:
        """C: in sequences of at most `max_pages`."""
        tokens = max(max_pages * page_size * self.percent // 100, self.least)
        return min(max(-(-tokens // page_size), 1), max_pages)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kascade(Policy):
    """Anchor layers choose by exact attention, others follow. For prompts, answers or both."""

    percent: int = 10  # of the positions that a row sees
    least: int = 128  # tokens
    anchors: tuple[int, ...] = ()  # layers, the first of which is 0, from `jaxserve calibrate`
    heads: tuple[tuple[int, ...], ...] = ()  # for each layer and KV head the last anchor's head that it follows

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.percent > 100:
            raise ValueError(f"percent of {self.name} must be at most 100, got {self.percent}")
        if self.layers != (0, None) or self.reselect > 1:
            raise ValueError(
                f"{self.name} is for all layers and rows: layers must be (0, None) and reselect 1, got {self.layers} "
                f"and {self.reselect}"
            )
        if self.anchors[:1] != (0,) or list(self.anchors) != sorted(set(self.anchors)) or not self.heads:
            raise ValueError(
                f"anchors of {self.name} must be layers in ascending order from 0 on, and heads be given for each "
                f"layer; give what jaxserve calibrate writes, got {self.anchors!r}"
            )

    @property
    def select(self) -> LargestMass:
        return LargestMass(percent=self.percent, least=self.least)

    @property
    def carries_over_layers(self) -> bool:
        return True

    def by_layers(self) -> Iterator[Part]:
        for anchor, end in itertools.zip_longest(self.anchors, self.anchors[1:]):
            yield Part(anchor, anchor + 1, KascadeLayers(whole=self, chooses=True, reads_all=anchor == 0))
            if end != anchor + 1:
                yield Part(anchor + 1, end, KascadeLayers(whole=self, chooses=False, reads_all=False))

    def check(self, page_size: int, layout: Layout) -> None:
        super().check(page_size, layout)
        num_layers, num_heads = len(layout.layer_kinds), layout.num_kv_heads
        if layout.tensor_parallel_size > 1 or set(layout.layer_kinds) != {"full"}:
            raise ValueError(f"{self.name} needs tensor_parallel_size 1 and a model without sliding windows")
        alike = len(self.heads) == num_layers and {len(heads) for heads in self.heads} == {num_heads}
        if not alike or any(not 0 <= head < num_heads for heads in self.heads for head in heads):
            raise ValueError(
                f"heads of {self.name} must be one among {num_heads} for each of {num_layers} layers and {num_heads} "
                f"KV heads, got {len(self.heads)} layers; run jaxserve calibrate with this model"
            )
        if self.anchors[-1] >= num_layers:
            raise ValueError(f"anchors of {self.name} must be among {num_layers} layers, got {self.anchors[-1]}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KascadeLayers(Policy):
    """What Kascade does in an anchor, or in the layers that follow one."""

    whole: Kascade
    chooses: bool
    reads_all: bool

    @property
    def select(self) -> LargestMass:
        return self.whole.select

    @property
    def carries_over_layers(self) -> bool:
        return True

    def follows(self, num_kv_heads: int, layer: int | Int[Array, ""]) -> Int[Array, " K"]:
        heads = jnp.asarray(self.whole.heads, jnp.int32)[layer]
        return jnp.concatenate([heads, jnp.arange(heads.shape[0], num_kv_heads, dtype=jnp.int32)])
