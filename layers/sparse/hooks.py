"""The hooks of sparse attention, the policies that fill them, and which policy holds for which rows and layers."""

import abc
import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import jax
from jax import Array
from jaxtyping import Float, Int

from jaxserve.pallas_kernels.paged_attention.types import AttentionBatch

ALL_PAGES = 2**30  # more than any sequence has


class PageMeta(abc.ABC):
    """What is kept of a page's keys, for each KV head: a `MaximumMeta`, a `WholePageMeta` or a `TokenMeta`.

    A page's score is the dot product of its metadata with `probe`. Where a page has `num_parts`, equal and in the order
    of its tokens, each has metadata, and the page's score is the best of theirs. Implementations are frozen
    dataclasses.
    """

    @property
    def num_parts(self) -> int:
        return 1

    @abc.abstractmethod
    def width(self, head_dim: int) -> int:
        """Numbers kept of each part of a page, for each KV head."""

    def size(self, head_dim: int, page_size: int) -> int:
        """M: numbers kept of a page, for each KV head."""
        return self.num_parts * self.width(head_dim)

    def in_layer(self, layer: int | Int[Array, ""]) -> "PageMeta":
        """The same, where it differs by layer; `layer` is its index among those of its kind."""
        return self

    @abc.abstractmethod
    def probe(self, q: Float[Array, "T K G H"]) -> Float[Array, "T K *probes width"]:
        """What a part's metadata is multiplied with for its score, float32: one for all heads of a group, or several,
        each of which gives scores of its own.
        """


class MaximumMeta(PageMeta):
    """The elementwise maximum over a page's tokens of `of_keys`.

    A maximum is the same in whatever order and parts keys come. It starts anew with a page's first token.
    """

    @abc.abstractmethod
    def of_keys(self, k: Float[Array, "T K H"]) -> Float[Array, "T K width"]:
        """The metadata of a part that holds this one key, after its rotation."""


class WholePageMeta(PageMeta):
    """`of_pages`, worked out once, when a page is complete: what keys add up to depends on their order otherwise."""

    @abc.abstractmethod
    def of_pages(self, k: Float[Array, "P page_size K H"]) -> Float[Array, "P K width"]:
        """The metadata of pages with these keys, after their rotation."""


class TokenMeta(PageMeta):
    """`of_keys` of each token: each is a part of its page."""

    def size(self, head_dim: int, page_size: int) -> int:
        return page_size * self.width(head_dim)

    @abc.abstractmethod
    def of_keys(self, k: Float[Array, "T K H"]) -> Float[Array, "T K width"]:
        """The metadata of tokens with these keys, after their rotation."""


class Select(abc.ABC):
    """Which pages a row reads."""

    @abc.abstractmethod
    def max_pages(self, page_size: int) -> int:
        """C: the most pages that a row selects for a KV head, however long its sequence is; ALL_PAGES = no limit."""

    @abc.abstractmethod
    def pages(
        self,
        kv_lens: Int[Array, " T"],
        page_size: int,
        scores: Float[Array, "T K *probes max_pages"] | None,
        layer: int | Int[Array, ""],
    ) -> Int[Array, "T heads C"]:
        """Numbers of pages in their sequences, ascending, then -1; `heads` is K, or 1 for the same in all heads.

        Args:
            kv_lens: positions that each row may see, its own included; 0 for padding, which selects nothing.
            scores: of the sequence's pages, if the policy has metadata. That of the last page, where metadata still
                grow, and those beyond mean nothing.
            layer: index of the layer among those of its kind.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy(abc.ABC):
    """One way to choose pages. A policy that has `page_meta` gets scores.

    With `reselect` above 1, a row of an answer that does not select reads what the last one that did has selected, and
    all pages begun since.

    Raises:
        ValueError: fields that make no sense, here, or for a page size and model, in `check`.
    """

    layers: tuple[int, int | None] = (0, None)  # the first that selects, and the one after the last; None = no last
    reselect: int = 1  # a row of an answer selects where its position is a multiple of this, and at the answer's start

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise ValueError(f"{field.name} of {self.name} must be an integer of at least 0, got {value!r}")
        if not self.reselect:
            raise ValueError(f"reselect of {self.name} must be at least 1, got 0")
        match self.layers:
            case (int(first), None) if first >= 0:
                pass
            case (int(first), int(last)) if 0 <= first < last:
                pass
            case _:
                raise ValueError(
                    f"layers of {self.name} must be (first, one after the last or None), got {self.layers!r}"
                )

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def page_meta(self) -> PageMeta | None:
        return None

    @property
    @abc.abstractmethod
    def select(self) -> Select | None:
        """None = all pages."""

    def skip_below(self, kv_lens: Int[Array, " T"]) -> Float[Array, " T"] | None:
        """For `paged_attention`: how far below the largest score so far a page's must be for a row to skip it, as a
        logarithm; None = no page is skipped.
        """
        return None

    @property
    def carries_over_layers(self) -> bool:
        """Whether layers read what earlier ones chose in the same step. Then `by_layers` says what it does in which
        layers: policies with `chooses`, `reads_all` and `follows`, as `kascade` has them.
        """
        return False

    def by_layers(self) -> "Iterator[Part]":
        """What holds in which layers."""
        yield Part(*self.layers, self)

    @property
    def unites_rows(self) -> bool:
        """Whether prompt tokens in the same page all read what one of them or more selects. Not for answers."""
        return False

    @property
    def min_pages(self) -> int:
        """Pages that a row must be able to read in any sequence that has them."""
        return 1

    def check(self, page_size: int, layout: "Layout") -> None:
        """Raises ValueError where the policy does not fit pages of this size, or the model."""
        num_pages = ALL_PAGES if self.select is None else self.select.max_pages(page_size)
        if num_pages < self.min_pages:
            raise ValueError(
                f"{self.name} must read at least {self.min_pages} pages of {page_size} tokens, got room for "
                f"{num_pages}; give it {self.min_pages * page_size} tokens, or a smaller page_size"
            )
        first, last = self.layers
        num_layers = len(layout.layer_kinds)
        if first >= num_layers or (last or 0) > num_layers:
            raise ValueError(
                f"layers of {self.name} must lie within the model's {num_layers}, got {self.layers}; give others, such "
                f"as (0, {num_layers})"
            )
        if "full" not in (kind for i, kind in enumerate(layout.layer_kinds) if self.holds_in(i)):
            raise ValueError(
                f"layers {self.layers} of {self.name} all have a sliding window, which sparse attention leaves as it "
                f"is; give others, or leave sparse_attention out"
            )
        if self.page_meta is not None and layout.kv_head_copies > 1:
            raise ValueError(
                f"{self.name} chooses pages for all query heads of a KV head together, so tensor_parallel_size must be "
                f"at most the number of KV heads; lower it and raise kv_parallel_size"
            )

    def holds_in(self, layer: int) -> bool:
        first, last = self.layers
        return first <= layer and (last is None or layer < last)


class Part(NamedTuple):
    """A policy and its layers: the first, and the one after the last; None = no last."""

    first: int
    last: int | None
    policy: Policy

    def holds_in(self, layer: int) -> bool:
        return self.first <= layer and (self.last is None or layer < self.last)


class Layout(NamedTuple):
    """What policies must fit, beside the page size."""

    layer_kinds: tuple[str, ...]
    num_kv_heads: int  # of a rank
    tensor_parallel_size: int
    kv_head_copies: int  # ranks that have the same KV head
    kv_parallel_size: int = 1


class LayerPolicies(NamedTuple):
    """Which policy holds in some layers; None = all pages are read."""

    decode: Policy | None
    prefill: Policy | None

    @property
    def page_meta(self) -> PageMeta | None:
        return next((policy.page_meta for policy in self if policy is not None and policy.page_meta), None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseStep:
    """What layers with policies need of a step, beside its prepared batch: its regions with all ranks' pages."""

    policies: LayerPolicies = dataclasses.field(metadata={"static": True})
    decode: AttentionBatch | None
    prefill: AttentionBatch | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseAttention:
    """The policies of an engine: for tokens of answers (`decode`), and for those of prompts (`prefill`).

    None means dense attention. Layers with a sliding window stay as they are.

    Raises:
        ValueError: two policies that keep different metadata of the same pages, one that reselects, for prompts, or one
            for prompts alone, for answers.
    """

    decode: Policy | None = None
    prefill: Policy | None = None

    def __post_init__(self) -> None:
        for name in ("decode", "prefill"):
            if not isinstance(policy := getattr(self, name), Policy | None):
                raise ValueError(f"{name} must be a policy such as Quest() or None, got {policy!r}")
        if self.prefill is not None and self.prefill.reselect > 1:
            raise ValueError(f"each token of a prompt selects: its reselect must be 1, got {self.prefill.reselect}")
        if self.decode is not None and self.decode.unites_rows:
            raise ValueError(f"{self.decode.name} is for prompts alone; give it as prefill, got it as decode")
        kept = {policy.page_meta for policy in self._policies() if policy.page_meta is not None}
        if len(kept) > 1:
            raise ValueError(f"decode and prefill must keep the same metadata of pages, got {sorted(map(repr, kept))}")

    @property
    def page_meta(self) -> PageMeta | None:
        return LayerPolicies(self.decode, self.prefill).page_meta

    @property
    def shares_answers(self) -> bool:
        """Whether a token's keys and values are the same in a prompt and in an answer."""
        return self.decode == self.prefill

    @property
    def carries_over_layers(self) -> bool:
        return any(policy.carries_over_layers for policy in self._policies())

    @property
    def cuts_at_pages(self) -> bool:
        """Whether steps may begin a part of a prompt only where a page begins."""
        return self.prefill is not None and self.prefill.unites_rows

    def check(self, page_size: int, layout: Layout) -> None:
        """Raises ValueError where a policy does not fit the model, its pages or its mesh."""
        for policy in self._policies():
            policy.check(page_size, layout)

    def segments(self, lo: int, hi: int) -> Iterator[tuple[int, int, LayerPolicies | None]]:
        """Layers `[lo, hi)` cut where policies begin or end, each piece with what holds there."""
        parts = [[] if policy is None else list(policy.by_layers()) for policy in (self.decode, self.prefill)]
        ends = (end for part in itertools.chain(*parts) for end in part[:2] if end is not None and lo < end < hi)
        for first, last in itertools.pairwise(sorted({lo, *ends, hi})):
            held = LayerPolicies(*(next((p.policy for p in own if p.holds_in(first)), None) for own in parts))
            yield first, last, held if any(held) else None

    def _policies(self) -> list[Policy]:
        return [policy for policy in (self.decode, self.prefill) if policy is not None]
