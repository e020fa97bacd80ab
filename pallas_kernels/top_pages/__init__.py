"""The pages with the best scores: for `layers.sparse`."""

from typing import Literal

from jax import Array
from jaxtyping import Float, Int

from jaxserve.pallas_kernels.fallback import say_once
from jaxserve.pallas_kernels.paged_attention import preferred
from jaxserve.pallas_kernels.top_pages import mosaic_gpu, xla

Implementation = Literal["xla", "mosaic_gpu"]


def top_pages(
    scores: Float[Array, "T K max_pages"],
    num_pages: Int[Array, " T"],
    most: int,
    *,
    implementation: Implementation | None = None,
) -> Int[Array, "T K C"]:
    """Numbers of `most` pages for each row and KV head: of its last page, and of those before with the best scores, of
    equal ones the first; ascending, then -1. C is `most`, or max_pages if that is less.

    Args:
        scores: float32; of a row's last page and beyond they mean nothing.
        num_pages: of each row; 0 selects nothing.
        implementation: None chooses by backend and falls back; a name is used or refused.
    Raises:
        NotImplementedError: the named implementation cannot do this; the message says why.
    """
    most = min(most, scores.shape[2])
    if implementation is None:
        implementation = _choose(scores)
    select = mosaic_gpu.top_pages if implementation == "mosaic_gpu" else xla.top_pages
    return select(scores, num_pages, most)


def _choose(scores: Array) -> Implementation:
    if preferred() != "mosaic_gpu":
        return "xla"
    if reason := mosaic_gpu.unsupported(scores):
        say_once("the choice of pages", reason)
    return "xla" if reason else "mosaic_gpu"
