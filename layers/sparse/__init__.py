"""Sparse attention as selection over pages: a query row reads some pages of its sequence, chosen for each KV head.

How this works. A *policy* says which pages. It fills some of the hooks in `hooks`: `PageMeta`, what is kept of each
page's keys while they are written, and `Select`, which pages a row reads. `selection` turns what a policy selects into
page tables for each KV head, which `paged_attention` takes like any others, and `attend` runs the rows of a step
through both. Policies are in a file each, and `options` knows their names.

Two rules make a token independent of how the work was cut, batched, cached or computed again:

- What a row selects follows from its query, its position and the pages before its own, which are complete. Its own page
  is always selected, so that metadata that is still growing decide nothing.
- Whether a row is the prompt's or the answer's is a matter of its position, not of the region that it runs in. So an
  answer that is computed again after pre-emption goes through the decode policy again. Keys and values of an answer are
  then not those that a prompt with the same tokens has: such pages are not shared, see `SparseAttention`.
"""

from jaxserve.layers.sparse.blasst import Blasst as Blasst
from jaxserve.layers.sparse.compact_attention import CompactAttention as CompactAttention
from jaxserve.layers.sparse.double_sparsity import DoubleSparsity as DoubleSparsity
from jaxserve.layers.sparse.flash_prefill import FlashPrefill as FlashPrefill
from jaxserve.layers.sparse.hooks import (
    LayerPolicies as LayerPolicies,
    Layout as Layout,
    MaximumMeta as MaximumMeta,
    PageMeta as PageMeta,
    Policy as Policy,
    Select as Select,
    SparseAttention as SparseAttention,
    TokenMeta as TokenMeta,
    WholePageMeta as WholePageMeta,
)
from jaxserve.layers.sparse.kascade import Kascade as Kascade
from jaxserve.layers.sparse.lserve import LServe as LServe
from jaxserve.layers.sparse.options import POLICIES as POLICIES, resolve as resolve
from jaxserve.layers.sparse.quest import Quest as Quest
from jaxserve.layers.sparse.streaming_llm import StreamingLLM as StreamingLLM
