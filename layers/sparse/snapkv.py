"""SnapKV (Li et al., arXiv 2404.14469): at the end of a prompt its last tokens vote for those that its answer may read.

Exact (FasterDecoding/SnapKV@395b54d): the softmax's weights of the prompt's last `window` rows are summed for each
token before them; the sums are pooled with their `kernel_size` neighbours, their mean or their largest, as `pooling`
says; the `budget - window` tokens with the most and the window itself stay. A prompt of up to `budget` tokens stays as
it is, and so do all tokens of the answer. The defaults are those of the code, which takes the mean; the configurations
of its experiments say maxpool, too.

Ours: the query heads of a KV head share their tokens: their votes are summed before they are pooled, where the code
lets each query head keep its own. Of equal votes the first tokens stay. Votes are added up row by row, in whichever
steps the window's rows are. Tokens stay in their pages, which are read where they hold one that is kept. So attention
reads less, but no memory becomes free.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxserve.layers.sparse.hooks import Policy, Retain
from jaxserve.layers.sparse.kept_pages import KeptPages
from jaxserve.layers.sparse.mass import heaviest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Votes(Retain):
    """What the last rows of a prompt attend to, and they themselves."""

    budget: int
    window: int
    kernel_size: int
    pooling: str

    def counts(self, positions: Int[Array, " T"], prompt_lens: Int[Array, " T"]) -> Bool[Array, " T"]:
        return positions >= prompt_lens - self.window

    def of_prompt(self, mass: Float[Array, "K S"], prompt_len: Int[Array, ""]) -> Bool[Array, "K S"]:
        is_older = (jnp.arange(mass.shape[1]) < prompt_len - self.window)[None]
        start, reduce = (0.0, jax.lax.add) if self.pooling == "avgpool" else (-jnp.inf, jax.lax.max)
        votes = jnp.where(is_older, mass, start)
        pooled = jax.lax.reduce_window(votes, start, reduce, (1, self.kernel_size), (1, 1), "SAME")
        return heaviest(pooled, is_older, self.budget - self.window) | ~is_older


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapKV(Policy):
    """What a prompt's end has voted for. For answers."""

    budget: int = 2048  # tokens of a prompt that each KV head keeps, those of the window too
    window: int = 32
    kernel_size: int = 5
    pooling: str = "avgpool"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.window < self.budget:
            raise ValueError(
                f"window of {self.name} must be at least 1 and below its budget of {self.budget}, got {self.window}"
            )
        if self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size of {self.name} must be odd, got {self.kernel_size}")
        if self.pooling not in ("avgpool", "maxpool"):
            raise ValueError(f"pooling of {self.name} must be 'avgpool' or 'maxpool', got {self.pooling!r}")

    @property
    def retain(self) -> Votes:
        return Votes(budget=self.budget, window=self.window, kernel_size=self.kernel_size, pooling=self.pooling)

    @property
    def select(self) -> KeptPages:
        return KeptPages()
