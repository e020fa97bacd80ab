"""The pages with the best scores, beside some that are always read."""

import dataclasses

from jax import Array
from jaxtyping import Float, Int

from jaxserve.layers.sparse.hooks import Select
from jaxserve.pallas_kernels.top_pages import top_pages


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
        return top_pages(scores, -(-kv_lens // page_size), self.max_pages(page_size))
