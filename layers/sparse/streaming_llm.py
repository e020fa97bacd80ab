"""StreamingLLM (Xiao et al., arXiv 2309.17453): the first tokens, which draw attention whatever they say, and the last.

Exact: a token attends to the first `sinks` positions and to the last `window`, its own included.

Ours: pages are read whole, so that up to a page more is seen on either side; and positions stay those of the text,
where the paper counts positions in its cache. So this is the paper's attention up to the length that the model was
trained for, not its way to go on for ever. The pages between stay in the cache: another policy or layer may read them.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jaxserve.layers.sparse.hooks import Policy, Select
from jaxserve.layers.sparse.selection import NO_PAGE


@dataclasses.dataclass(frozen=True)
class SinksAndWindow(Select):
    """The pages that hold one of the first `sinks` positions or of the last `window`."""

    sinks: int
    window: int

    def max_pages(self, page_size: int) -> int:
        return -(-self.sinks // page_size) + -(-(self.window - 1) // page_size) + 1

    def pages(
        self,
        kv_lens: Int[Array, " T"],
        page_size: int,
        scores: Float[Array, "T K max_pages"] | None = None,
        layer: int | Int[Array, ""] = 0,
    ) -> Int[Array, "T 1 C"]:
        num_sinks = -(-self.sinks // page_size)
        first_recent = jnp.maximum(jnp.maximum(kv_lens - self.window, 0) // page_size, num_sinks)
        place = jax.lax.broadcasted_iota(jnp.int32, (kv_lens.shape[0], self.max_pages(page_size)), 1)
        numbers = jnp.where(place < num_sinks, place, first_recent[:, None] + place - num_sinks)
        return jnp.where(numbers * page_size < kv_lens[:, None], numbers, NO_PAGE)[:, None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamingLLM(Policy):
    """Attention sinks and a window. For prompts, answers or both; the defaults are the paper's 1,024 cached tokens."""

    sinks: int = 4
    window: int = 1020

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1:  # a row sees itself
            raise ValueError(f"window of {self.name} must be at least 1, got {self.window}")

    @property
    def select(self) -> SinksAndWindow:
        return SinksAndWindow(self.sinks, self.window)
