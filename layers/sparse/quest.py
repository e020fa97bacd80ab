"""Quest (Tang et al., arXiv 2406.10774): for each token of an answer the pages that may hold the largest scores.

Exact: a page keeps the least and the largest value of each channel of its keys; `sum_d max(q_d min_d, q_d max_d)`
bounds the score of each of its keys; the `budget // page_size` pages with the largest bounds are read, the last page
always among them and at least three in all; the first two layers are dense, and so are prompts.

Ours: the query heads of a KV head share its pages, by the sum of their bounds (the paper's models have a KV head for
each); of equal bounds the first page goes first. The page size is that of the KV cache; the paper's is 16. The bounds
are of what the pages hold, in float8 too. The published kernels (mit-han-lab/Quest@ade6f7c) always read the last page,
the published evaluation wherever it is among the best; here it always is read, and its bounds, which still grow, are
not.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxserve.layers.sparse.hooks import MaximumMeta, Policy
from jaxserve.layers.sparse.top_pages import TopPages


@dataclasses.dataclass(frozen=True)
class KeyBounds(MaximumMeta):
    """The largest `[-k, k]` of a part, which is its least key with the sign turned, and its largest key."""

    parts: int = 1

    @property
    def num_parts(self) -> int:
        return self.parts

    def width(self, head_dim: int) -> int:
        return 2 * head_dim

    def of_keys(self, k: Float[Array, "T K H"]) -> Float[Array, "T K width"]:
        return jnp.concatenate([-k, k], axis=-1)

    def probe(self, q: Float[Array, "T K G H"]) -> Float[Array, "T K width"]:
        """`max(q min, q max) = relu(-q) (-min) + relu(q) max`, and summed over the group it is still a product."""
        q = q.astype(jnp.float32)
        return jnp.sum(jax.nn.relu(jnp.concatenate([-q, q], axis=-1)), axis=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quest(Policy):
    """The pages with the largest bounds on their scores. For answers; the paper's budgets are 512 to 4,096 tokens."""

    layers: tuple[int, int | None] = (2, None)
    budget: int = 2048  # tokens that a row reads in each layer and KV head

    @property
    def page_meta(self) -> KeyBounds:
        return KeyBounds()

    @property
    def select(self) -> TopPages:
        return TopPages(budget=self.budget)

    @property
    def min_pages(self) -> int:
        return 3
