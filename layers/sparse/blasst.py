"""BLASST (Yuan et al., arXiv 2512.12087): blocks of keys whose best score is far below the best so far are skipped.

Exact: blocks come in the order of the text, each query row keeps the largest score up to and with the present block,
and a block whose own largest is less than `ln(threshold)` from that takes no part in the softmax; the threshold is
`threshold_scale_factor` over the length of the context.

Ours: a block is a page (128 tokens in the paper), and each query head of each token decides by itself, where a kernel
decides for a tile of rows together and skips what all of them would. The length is the number of positions that the
token sees, so that it does not depend on what follows, and the threshold is at most 1. The default is a careful one
(0.001 at 8,192 positions): the paper fits it to the sparsity that is wished for on each model. It is not for KV
parallelism, where no rank sees all blocks in their order.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jaxserve.layers.sparse.hooks import Layout, Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blasst(Policy):
    """All pages, less those that cannot matter. For prompts, answers or both."""

    threshold_scale_factor: float = 8.0  # 0 skips nothing

    def __post_init__(self) -> None:
        super().__post_init__()
        factor = self.threshold_scale_factor
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor >= 0:
            raise ValueError(f"threshold_scale_factor of {self.name} must be a number of at least 0, got {factor!r}")
        if self.reselect > 1:
            raise ValueError(f"{self.name} selects nothing, so reselect must be 1, got {self.reselect}")

    @property
    def select(self) -> None:
        return None

    def skip_below(self, kv_lens: Int[Array, " T"]) -> Float[Array, " T"]:
        return jnp.minimum(jnp.log(self.threshold_scale_factor / jnp.maximum(kv_lens, 1).astype(jnp.float32)), 0.0)

    def check(self, page_size: int, layout: Layout) -> None:
        super().check(page_size, layout)
        if layout.kv_parallel_size > 1:
            raise ValueError(
                f"{self.name} compares each page with all before it, so kv_parallel_size must be 1, got "
                f"{layout.kv_parallel_size}; raise tensor_parallel_size instead"
            )
