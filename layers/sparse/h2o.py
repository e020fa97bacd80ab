"""H2O (Zhang et al., arXiv 2306.14048): each KV head keeps the tokens that have drawn the most attention, the heavy
hitters, and the most recent ones.

Exact (FMInference/H2O@0ee6a85, `utils_real_drop`): a prompt attends to all of itself; each token's mass is the sum of
the softmax's weights that it got from all rows up to now, those of the prompt too. After the prompt the `heavy` tokens
of the largest mass and the last `recent` stay. Each token of an answer attends to what is kept and to itself, adds to
the mass of both, and then the lightest of those that are not among the last `recent` goes. What is gone never returns.

Ours: the paper keeps 10 % and 10 % of a prompt, here both are numbers of tokens; the query heads of a KV head share
their tokens, by the sum of their mass (the paper's models have a KV head for each); of tokens with equal mass the first
stay; keys keep the rotation of their positions in the text. Tokens stay in their pages, which are read where they hold
one that is kept. So attention reads less, but no memory becomes free.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxserve.layers.sparse.hooks import Policy, Retain
from jaxserve.layers.sparse.kept_pages import KeptPages
from jaxserve.layers.sparse.mass import heaviest


@dataclasses.dataclass(frozen=True)
class HeavyAndRecent(Retain):
    """The heaviest tokens and the last ones."""

    heavy: int
    recent: int

    def counts(self, positions: Int[Array, " T"], prompt_lens: Int[Array, " T"]) -> Bool[Array, " T"]:
        return jnp.ones(positions.shape, bool)

    def of_prompt(self, mass: Float[Array, "K S"], prompt_len: Int[Array, ""]) -> Bool[Array, "K S"]:
        is_older = (jnp.arange(mass.shape[1]) < prompt_len - self.recent)[None]
        return heaviest(mass, is_older, self.heavy) | ~is_older

    @property
    def of_answers(self) -> tuple[int, int]:
        return self.heavy, self.recent


@dataclasses.dataclass(frozen=True, kw_only=True)
class H2O(Policy):
    """Heavy hitters and recent tokens. For answers."""

    heavy: int = 1024
    recent: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("heavy", "recent"):
            if not getattr(self, name):
                raise ValueError(f"{name} of {self.name} must be at least 1, got 0")

    @property
    def retain(self) -> HeavyAndRecent:
        return HeavyAndRecent(self.heavy, self.recent)

    @property
    def select(self) -> KeptPages:
        return KeptPages(max_tokens=self.heavy + self.recent + 1)  # its own token too
