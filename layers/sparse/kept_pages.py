"""The pages with tokens that are kept."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jaxserve.layers.sparse.hooks import ALL_PAGES, Select
from jaxserve.layers.sparse.selection import ascending


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeptPages(Select):
    """Each page that has one of `max_tokens` kept tokens for the KV head. Scores are their numbers."""

    max_tokens: int = ALL_PAGES

    def max_pages(self, page_size: int) -> int:
        return self.max_tokens  # each may lie in another page

    def pages(
        self,
        kv_lens: Int[Array, " T"],
        page_size: int,
        scores: Float[Array, "T K max_pages"] | None,
        layer: int | Int[Array, ""],
    ) -> Int[Array, "T K C"]:
        assert scores is not None, "a policy that keeps tokens gets their numbers"
        number = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2)
        is_page = (scores > 0) & (number * page_size < kv_lens[:, None, None])
        return ascending(number, is_page)[..., : self.max_pages(page_size)]
