"""How well the pages of sequences may match queries, by what is kept of them: for `layers.sparse`."""

from typing import Literal

from jax import Array
from jaxtyping import Float, Int

from jaxserve.pallas_kernels.fallback import say_once
from jaxserve.pallas_kernels.page_scores import mosaic_gpu, xla
from jaxserve.pallas_kernels.paged_attention import preferred

Implementation = Literal["xla", "mosaic_gpu"]


def page_scores(
    probe: Float[Array, "T K width"],
    meta: Float[Array, "L P K M"],
    layer: int | Int[Array, ""],
    page_table: Int[Array, "T max_pages"],
    num_pages: Int[Array, " T"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "T K max_pages"]:
    """Dot products of each row's probe with the metadata of its sequence's pages, float32; where these are of parts of
    a page, M // width of them, the largest.

    Args:
        page_table: ids of pages; a page of an id below 0 is not here and scores 0.
        num_pages: of each sequence; the scores of what its table holds beyond them mean nothing.
        implementation: None chooses by backend and falls back; a name is used or refused.
    Raises:
        NotImplementedError: the named implementation cannot do this; the message says why.
    """
    if implementation is None:
        implementation = _choose(probe, meta)
    scores = mosaic_gpu.page_scores if implementation == "mosaic_gpu" else xla.page_scores
    return scores(probe, meta, layer, page_table, num_pages)


def _choose(probe: Array, meta: Array) -> Implementation:
    if preferred() != "mosaic_gpu":
        return "xla"
    if reason := mosaic_gpu.unsupported(probe, meta):
        say_once("the scores of pages", reason)
    return "xla" if reason else "mosaic_gpu"
