"""CompactAttention (Song et al., arXiv 2605.16839): block masks as page tables, one for each KV head and block of rows.

Exact: the masks of FlashPrefill are united over the rows of a block and over the query heads of a KV head, and all
these rows attend to the pages of one table, their own causally. `alpha` is the published one for these masks.

Ours: the rows that share a table are the tokens of a page, wherever steps begin: the paper unites a whole chunk, so
that what a token reads would depend on how its prompt is cut. Later tokens of the page have a say too, so prompts are
cut between pages only, and a prefix is shared by whole pages, which have one mask. Masks are those of single rows, as
in `flash_prefill`, with what is said there of means and of the last blocks of a prompt.
"""

import dataclasses

from jaxserve.layers.sparse.flash_prefill import FlashPrefill


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompactAttention(FlashPrefill):
    """FlashPrefill with one table for all prompt tokens of a page. For prompts alone."""

    alpha: float = 0.06

    @property
    def unites_rows(self) -> bool:
        return True
