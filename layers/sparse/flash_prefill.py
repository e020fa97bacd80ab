"""FlashPrefill (Fan et al., arXiv 2603.06199): the pages whose mean key comes near a query's best, without sorting.

Exact (qhfan/FlashPrefill): a block keeps the mean of its keys; a query's score for it is the exponential of their
scaled product; blocks with at least `alpha` times the largest score are read, and the first `sinks` tokens' and the
last `window`'s. Defaults are the published ones for Llama, of blocks of 128 tokens.

Ours: blocks are pages. Each row is a block of queries of its own: the paper adds up the scores of 128 rows, also of
later ones, so that what a token reads would depend on where a prompt is cut into steps and on what follows a shared
prefix. A page is read by all query heads of a KV head if one of them keeps it. The row's own page is always read and
its mean, which still grows, is not; the paper's last row of a block compares it. The last two blocks of a prompt, dense
in the paper, are not here: the keys and values of a shared prefix would depend on where its prompt ended. Products are
scaled by `head_dim ** -0.5`, as published, also where a model has another scale or a soft cap.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jaxserve.layers.sparse.hooks import ALL_PAGES, Policy, Select, WholePageMeta
from jaxserve.layers.sparse.selection import ascending


@dataclasses.dataclass(frozen=True)
class MeanKeys(WholePageMeta):
    """The mean of a page's keys; a score for each query head."""

    def width(self, head_dim: int) -> int:
        return head_dim

    def of_pages(self, k: Float[Array, "P page_size K H"]) -> Float[Array, "P K width"]:
        return jnp.mean(k, axis=1)

    def probe(self, q: Float[Array, "T K G H"]) -> Float[Array, "T K G width"]:
        return q.astype(jnp.float32) * q.shape[3] ** -0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class NearTheBest(Select):
    """Complete pages before the row's own with `exp(score) >= alpha * max(exp(scores))` of one head of the group or
    more, those of the first `sinks` tokens, and the last ones, its own included, that hold `window`.
    """

    alpha: float
    sinks: int
    window: int

    def max_pages(self, page_size: int) -> int:
        return ALL_PAGES

    def pages(
        self,
        kv_lens: Int[Array, " T"],
        page_size: int,
        scores: Float[Array, "T K G max_pages"] | None,
        layer: int | Int[Array, ""],
    ) -> Int[Array, "T K max_pages"]:
        assert scores is not None
        number = jnp.arange(scores.shape[3], dtype=jnp.int32)[None, None]
        last = jnp.where(kv_lens > 0, (kv_lens - 1) // page_size, -1)[:, None, None]
        best = jnp.max(scores, axis=3, keepdims=True, where=(number < last)[:, :, None], initial=-jnp.inf)
        keeps = jnp.any(jnp.exp(scores - best) >= self.alpha, axis=2) & (number < last)
        keeps |= number < -(-self.sinks // page_size)
        keeps |= number > last - max(-(-self.window // page_size), 1)
        return ascending(jnp.broadcast_to(number, keeps.shape), keeps & (number <= last))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlashPrefill(Policy):
    """The pages that come near the best, a sink and a window. For prompts."""

    alpha: float = 0.18  # of the largest score; 0 keeps all, 1 the best alone
    sinks: int = 256
    window: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float) or not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha of {self.name} must be a number in [0, 1], got {self.alpha!r}")

    @property
    def page_meta(self) -> MeanKeys:
        return MeanKeys()

    @property
    def select(self) -> NearTheBest:
        return NearTheBest(alpha=self.alpha, sinks=self.sinks, window=self.window)
