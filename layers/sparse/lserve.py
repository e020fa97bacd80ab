"""LServe (Yang et al., arXiv 2502.14866): a sink and a window for KV heads that need no more, and for the others the
pages that may hold the largest scores, chosen anew every few tokens.

Exact (mit-han-lab/omniserve): streaming heads read `sinks` and `local` tokens; others `budget // page_size` pages, the
last always among them and at least three in all, by the bounds of Quest over each of `parts` logical pages of a page,
whose best is the page's; what was chosen is read again until the position is a multiple of `reselect`.

Ours: which heads stream is not known from a model but from training a gate for each (DuoAttention, arXiv 2410.10819);
they are given as `streaming_heads`, and without them all heads choose. The query heads of a KV head share its pages, by
the sum of their bounds. Pages begun since the last choice are read too. Streaming heads keep their pages: they save
time but no memory. Prompts are dense, where in the paper streaming heads stream, and nothing is quantised.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from jaxserve.layers.sparse.hooks import Layout, Policy, Select
from jaxserve.layers.sparse.quest import KeyBounds
from jaxserve.layers.sparse.selection import NO_PAGE
from jaxserve.layers.sparse.streaming_llm import SinksAndWindow
from jaxserve.layers.sparse.top_pages import TopPages


@dataclasses.dataclass(frozen=True)
class ByHead(Select):
    """What `streaming` selects for some heads, as pairs of layer and head, and `others` for the rest."""

    heads: tuple[tuple[int, int], ...]
    streaming: Select
    others: Select

    def max_pages(self, page_size: int) -> int:
        return max(self.streaming.max_pages(page_size), self.others.max_pages(page_size))

    def pages(
        self,
        kv_lens: Int[Array, " T"],
        page_size: int,
        scores: Float[Array, "T K max_pages"] | None,
        layer: int | Int[Array, ""],
    ) -> Int[Array, "T K C"]:
        assert scores is not None
        K, most = scores.shape[1], min(self.max_pages(page_size), scores.shape[2])
        numbers = []
        for select in (self.streaming, self.others):
            found = select.pages(kv_lens, page_size, scores, layer)[..., :most]
            numbers.append(jnp.pad(found, ((0, 0), (0, 0), (0, most - found.shape[2])), constant_values=NO_PAGE))
        streams = np.zeros((2 + max(layer for layer, _ in self.heads), K), bool)  # the last row is for layers without
        for row, head in self.heads:
            streams[row, head] = True
        is_streaming = jnp.asarray(streams)[jnp.minimum(layer, len(streams) - 1)]
        return jnp.where(is_streaming[None, :, None], *numbers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LServe(Policy):
    """Streaming heads, and the best pages every few tokens. For answers."""

    reselect: int = 4
    budget: int = 4096  # tokens that a row reads in each layer and KV head that does not stream
    parts: int = 4  # of a page, each with its own bounds
    sinks: int = 128
    local: int = 256
    streaming_heads: tuple[tuple[int, int], ...] = ()  # (layer, KV head)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("parts", "local"):
            if not getattr(self, name):
                raise ValueError(f"{name} of {self.name} must be at least 1, got 0")
        match self.streaming_heads:
            case tuple(pairs) if all(map(_is_pair, pairs)):
                pass
            case _:
                raise ValueError(
                    f"streaming_heads of {self.name} must be pairs of layer and KV head, got {self.streaming_heads!r}"
                )

    @property
    def page_meta(self) -> KeyBounds:
        return KeyBounds(self.parts)

    @property
    def select(self) -> Select:
        top = TopPages(budget=self.budget)
        if not self.streaming_heads:
            return top
        return ByHead(self.streaming_heads, SinksAndWindow(self.sinks, self.local), top)

    @property
    def min_pages(self) -> int:
        return 3

    def check(self, page_size: int, layout: Layout) -> None:
        super().check(page_size, layout)
        if self.budget < self.min_pages * page_size:
            raise ValueError(
                f"budget of {self.name} must hold {self.min_pages} pages of {page_size} tokens, got {self.budget}"
            )
        if page_size % self.parts:
            raise ValueError(f"parts of {self.name} must divide a page of {page_size} tokens, got {self.parts}")
        if not self.streaming_heads:
            return
        if layout.tensor_parallel_size > 1 or set(layout.layer_kinds) != {"full"}:
            raise ValueError(
                f"streaming_heads of {self.name} need tensor_parallel_size 1 and a model without sliding windows; "
                f"leave them out, so that all heads choose their pages"
            )
        for layer, head in self.streaming_heads:
            if layer >= len(layout.layer_kinds) or head >= layout.num_kv_heads:
                raise ValueError(
                    f"streaming_heads of {self.name} must be among {len(layout.layer_kinds)} layers and "
                    f"{layout.num_kv_heads} KV heads, got {(layer, head)}"
                )


def _is_pair(value: object) -> bool:
    match value:
        case (int(layer), int(head)):
            return layer >= 0 and head >= 0
    return False
