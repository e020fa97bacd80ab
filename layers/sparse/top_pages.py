"""The pages with the best scores, beside some that are always read."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jaxserve.layers.sparse.hooks import Select
from jaxserve.layers.sparse.selection import ascending


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopPages(Select):
    """Pages of `budget` tokens for each KV head: the last one, and the best. Of equal ones the first go first."""

    budget: int

    def max_pages(self, page_size: int) -> int:
        return self.budget // page_size

    def pages(
        self,
        kv_lens: Int[Array, " T"],
        page_size: int,
        scores: Float[Array, "T K max_pages"] | None = None,
        layer: int | Int[Array, ""] = 0,
    ) -> Int[Array, "T K C"]:
        assert scores is not None, "a policy that takes the best pages needs metadata"
        number = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2)
        last = (kv_lens[:, None, None] - 1) // page_size
        rank = jnp.where(number == last, jnp.inf, jnp.where(number < last, scores, -jnp.inf))
        best, numbers = jax.lax.top_k(rank, min(self.max_pages(page_size), scores.shape[2]))
        return ascending(numbers, best > -jnp.inf)
