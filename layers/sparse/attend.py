"""Attention of a step's rows in layers with policies.

Each row is a sequence of its own here, of the positions up to it. Rows that a policy is for are taken some at a time,
so that where there are none it costs a loop of no turns.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jaxserve.layers.sparse.hooks import LayerPolicies, Policy
from jaxserve.layers.sparse.kascade import KascadeLayers
from jaxserve.layers.sparse.mass import drop_lightest, end_prompts
from jaxserve.layers.sparse.page_mass import page_masses
from jaxserve.layers.sparse.selection import NO_PAGE, all_pages, select_pages, tables_of, united, with_pages_begun
from jaxserve.pallas_kernels.paged_attention.types import AttentionBatch, KVCache
from jaxserve.pallas_kernels.target import target_device

# (query rows, region, skip_below=what `Policy.skip_below` says of them, cache=that of the layer): output and lse
Attention = Callable[..., tuple[Array, Array]]
# (rows, their lse, which count, cache, region)
Draw = Callable[[Array, Array, Array, KVCache, AttentionBatch], KVCache]


class Rows(NamedTuple):
    """Query rows, and the region with all ranks' pages that they are of."""

    q: Array  # [T, N, H]
    region: AttentionBatch
    sequence: Array  # i32 [T], of the region
    seen: Array  # i32 [T], positions that each row sees; 0 where the policy is not for it

    @property
    def page_table(self) -> Array:
        return self.region.page_table[self.sequence]


def attend_decode(
    policy: Policy,
    q: Float[Array, "S N H"],
    kv: KVCache,
    layer: int | Int[Array, ""],
    region: AttentionBatch,
    attention: Attention,
    draw: Draw | None = None,
) -> tuple[tuple[Float[Array, "S N H"], Float[Array, "S N"]], KVCache]:
    """Attention of the decode region's rows to what the policy selects, and the cache with what it carries on.

    Args:
        draw: where tokens are dropped.
    """
    assert region.max_q_len == 1
    if policy.retain is not None and policy.retain.of_answers is not None:
        assert draw is not None
        return _attend_and_drop(policy, q, kv, layer, region.page_table, region.kv_lens, attention, draw)
    rows = Rows(q, region, jnp.arange(q.shape[0]), region.kv_lens)
    if policy.reselect == 1 and not policy.carries_over_layers:
        numbers = select_pages(policy, q, kv, layer, region.page_table, region.kv_lens)
    else:
        numbers, kv = select_rows(policy, rows, kv, layer, attention)
    return _attend(policy, rows, numbers, kv, attention), kv


def attend_prefill(
    policies: LayerPolicies,
    q: Float[Array, "T N H"],
    kv: KVCache,
    layer: int | Int[Array, ""],
    region: AttentionBatch,
    own: AttentionBatch,
    attention: Attention,
    draw: Draw | None = None,
) -> tuple[tuple[Float[Array, "T N H"], Float[Array, "T N"]], KVCache]:
    """Attention of the prefill region's rows, each under the policy for its kind of token; the rest as `attend_decode`.

    Rows of answers are here only when they are computed again.

    Args:
        own: the region as it is prepared for attention of all rows to all that they see.
    """
    dense = None in policies
    out = attention(q, own) if dense else (jnp.zeros(q.shape, q.dtype), jnp.full(q.shape[:2], -jnp.inf))
    if policies.decode is not None and policies.decode.retain is not None:
        assert draw is not None
        return _attend_kept(policies.decode, q, kv, layer, region, own, attention, draw, out)
    for policy, rows in rows_by_policy(policies, q, region):
        if policy.reselect == 1 and not policy.carries_over_layers:
            out = _select_and_attend(policy, rows, kv, layer, attention, out)
        else:
            numbers, kv = select_rows(policy, rows, kv, layer, attention)
            out = attend_rows(policy, rows, numbers, kv, attention, out)
    return out, kv


def rows_by_policy(
    policies: LayerPolicies, q: Float[Array, "T N H"], region: AttentionBatch
) -> Iterator[tuple[Policy, Rows]]:
    """Each policy with a prefill region's rows, of which those for other tokens see nothing. Not where tokens are
    dropped: there rows depend on those before them.
    """
    assert policies.retain is None
    sequence, seen = _places(q, region)
    is_answer = jnp.zeros(seen.shape, bool) if region.prompt_lens is None else seen > region.prompt_lens[sequence]
    for policy, mine in ((policies.prefill, ~is_answer), (policies.decode, is_answer)):
        if policy is not None:
            yield policy, Rows(q, region, sequence, jnp.where(mine, seen, 0))


def _places(q: Array, region: AttentionBatch) -> tuple[Array, Array]:
    """The sequence of each row of a prefill region, and how many positions it sees, 0 for padding."""
    assert region.cu_q_lens is not None
    row = jnp.arange(q.shape[0], dtype=jnp.int32)
    last = region.kv_lens.shape[0] - 1
    sequence = jnp.minimum(jnp.searchsorted(region.cu_q_lens, row, side="right") - 1, last)
    seen = region.kv_lens[sequence] - region.cu_q_lens[sequence + 1] + row + 1
    return sequence, jnp.where(row < region.cu_q_lens[-1], seen, 0)


def _attend_kept(
    policy: Policy,
    q: Array,
    kv: KVCache,
    layer: int | Array,
    region: AttentionBatch,
    own: AttentionBatch,
    attention: Attention,
    draw: Draw,
    out: tuple[Array, Array],
) -> tuple[tuple[Array, Array], KVCache]:
    """`attend_prefill` where tokens are dropped; `out` is dense attention, which is that of prompts' rows."""
    retain = policy.retain
    assert retain is not None
    assert region.prompt_lens is not None
    sequence, seen = _places(q, region)
    prompt_lens = region.prompt_lens[sequence]
    counts = (seen > 0) & (seen <= prompt_lens) & retain.counts(seen - 1, prompt_lens)
    kv = end_prompts(retain, draw(q, out[1], counts, kv, own), layer, region)
    rows = Rows(q, region, sequence, jnp.where(seen > prompt_lens, seen, 0))
    if retain.of_answers is not None:
        return _attend_and_drop_in_turn(policy, rows, kv, layer, attention, draw, out)
    numbers, kv = select_rows(policy, rows, kv, layer)
    return attend_rows(policy, rows, numbers, kv, functools.partial(attention, cache=kv), out), kv


def _attend_and_drop(
    policy: Policy,
    q: Array,
    kv: KVCache,
    layer: int | Array,
    page_table: Array,
    seen: Array,
    attention: Attention,
    draw: Draw,
) -> tuple[tuple[Array, Array], KVCache]:
    """Attention of one answer's row a sequence to what is kept, and the cache with what it has drawn and dropped."""
    assert policy.retain is not None
    assert policy.retain.of_answers is not None
    heavy, recent = policy.retain.of_answers
    numbers = select_pages(policy, q, kv, layer, page_table, seen)
    tables = tables_of(numbers, page_table, seen, kv.page_size, kv.k.shape[1])
    out, lse = attention(q, tables, cache=kv)
    kv = draw(q, lse, seen > 0, kv, tables)
    kv = drop_lightest(kv, layer, page_table, jnp.maximum(seen - recent, 0), seen > heavy + recent)
    return (out, lse), kv


def _attend_and_drop_in_turn(
    policy: Policy, rows: Rows, kv: KVCache, layer: int | Array, attention: Attention, draw: Draw, out: tuple
) -> tuple[tuple[Array, Array], KVCache]:
    """`out` with that of answers' rows in a prefill region, and the cache: one of each sequence at a time, since what a
    row has drawn and dropped decides what the next one reads.
    """
    region, num_rows = rows.region, rows.seen.shape[0]
    assert region.cu_q_lens is not None
    num_seqs = region.kv_lens.shape[0]
    counts = jnp.zeros(num_seqs, jnp.int32).at[rows.sequence].add((rows.seen > 0).astype(jnp.int32))
    first = region.cu_q_lens[1:] - counts  # an answer's rows are the last ones of its sequence

    def turn(i: Array, carry: tuple) -> tuple:
        out, kv = carry
        row = jnp.where(i < counts, first + i, num_rows)
        seen = jnp.where(i < counts, region.kv_lens - counts + i + 1, 0)
        q = rows.q.at[row].get(mode="clip")
        new, kv = _attend_and_drop(policy, q, kv, layer, region.page_table, seen, attention, draw)
        return jax.tree.map(lambda x, y: x.at[row].set(y.astype(x.dtype), mode="drop"), out, new), kv

    return jax.lax.fori_loop(0, jnp.max(counts), turn, (out, kv))


def select_rows(
    policy: Policy, rows: Rows, kv: KVCache, layer: int | Array, attention: Attention | None = None
) -> tuple[Array, KVCache]:
    """Numbers of the pages that rows read [T, K, C], and the cache with what is carried on.

    Args:
        attention: where layers choose by it.
    """
    period, seen = policy.reselect, rows.seen
    if policy.carries_over_layers:
        assert attention is not None
        return _choose_or_follow(policy, rows, kv, layer, attention)
    if period == 1:
        return _select_where(seen > 0, policy, rows, kv, layer), kv
    assert rows.region.prompt_lens is not None
    at = jnp.maximum((seen - 1) // period * period, rows.region.prompt_lens[rows.sequence]) + 1  # when it last selected
    numbers = _select_where((seen > 0) & (seen == at), policy, rows, kv, layer)
    numbers, kv = _carry(numbers, at, rows, kv, layer)
    return with_pages_begun(numbers, at, seen, kv.page_size, -(-(period - 1) // kv.page_size)), kv


def _select_where(wanted: Array, policy: Policy, rows: Rows, kv: KVCache, layer: int | Array) -> Array:
    """What these rows select; others nothing."""
    if target_device().platform == "gpu" and rows.region.cu_q_lens is None:  # what is saved is less than a loop costs
        return select_pages(policy, rows.q, kv, layer, rows.region.page_table, jnp.where(wanted, rows.seen, 0))

    def some(part: Rows, _: Array) -> Array:
        return _select(policy, part, kv, layer)

    most = rows.region.page_table.shape[1]
    most = most if policy.select is None else min(policy.select.max_pages(kv.page_size), most)
    shape = (rows.q.shape[0], kv.num_heads(rows.q.shape[2]), most)
    return _over_units(policy, kv.page_size)(wanted, some, rows, jnp.full(shape, NO_PAGE, jnp.int32))


def _choose_or_follow(
    policy: Policy, rows: Rows, kv: KVCache, layer: int | Array, attention: Attention
) -> tuple[Array, KVCache]:
    assert isinstance(policy, KascadeLayers)
    assert kv.chosen is not None
    is_prefill = rows.region.cu_q_lens is not None
    chosen = kv.chosen[is_prefill]
    if not policy.chooses:
        return chosen[:, policy.follows(chosen.shape[1], layer)], kv

    def some(part: Rows, _: Array) -> Array:
        masses = page_masses(attention, part.q, kv, part.page_table, part.seen)
        numbers = policy.select.pages(part.seen, kv.page_size, masses, layer)
        return jnp.pad(numbers, ((0, 0), (0, 0), (0, chosen.shape[2] - numbers.shape[2])), constant_values=NO_PAGE)

    chosen = _over(rows.seen > 0, some, rows, chosen)
    both = (kv.chosen[0], chosen) if is_prefill else (chosen, kv.chosen[1])
    return chosen, dataclasses.replace(kv, chosen=both)


def _select(policy: Policy, part: Rows, kv: KVCache, layer: int | Array) -> Array:
    """What rows select; what one of them or more does, where these are those of a page and the policy unites them."""
    numbers = select_pages(policy, part.q, kv, layer, part.page_table, part.seen)
    return united(numbers, part.page_table.shape[1]) if policy.unites_rows else numbers


def _carry(numbers: Array, at: Array, rows: Rows, kv: KVCache, layer: int | Array) -> tuple[Array, KVCache]:
    """What each row's sequence selected when its rows saw `at` positions: in this region, or before. The cache keeps
    what the last row of each sequence here has.
    """
    region, row = rows.region, jnp.arange(rows.seen.shape[0])
    assert kv.carry is not None
    assert region.slots is not None
    slots = region.slots[rows.sequence]
    first, end = (row, row + 1) if region.cu_q_lens is None else (region.cu_q_lens[rows.sequence + i] for i in (0, 1))
    source = row - (rows.seen - at)
    here = (source >= first)[:, None, None]
    numbers = jnp.where(here, numbers[jnp.maximum(source, 0)], kv.carry[layer, slots])
    to = jnp.where((row + 1 == end) & (rows.seen > 0), slots, kv.carry.shape[1])
    return numbers, dataclasses.replace(kv, carry=kv.carry.at[layer, to].set(numbers, mode="drop"))


def _select_and_attend(
    policy: Policy, rows: Rows, kv: KVCache, layer: int | Array, attention: Attention, out: tuple
) -> tuple[Array, Array]:
    """As `attend_rows`, where what rows select is forgotten again: of all of them it would take much memory."""

    def some(part: Rows, _: Array) -> tuple[Array, Array]:
        return _attend(policy, part, _select(policy, part, kv, layer), kv, attention)

    return _over_units(policy, kv.page_size)(rows.seen > 0, some, rows, out)


def attend_rows(
    policy: Policy, rows: Rows, numbers: Array, kv: KVCache, attention: Attention, out: tuple
) -> tuple[Array, Array]:
    """`out` with that of the rows that read something."""

    def some(part: Rows, at: Array) -> tuple[Array, Array]:
        return _attend(policy, part, numbers[at], kv, attention)

    return _over(rows.seen > 0, some, rows, out)


def _attend(policy: Policy, part: Rows, numbers: Array, kv: KVCache, attention: Attention) -> tuple[Array, Array]:
    """Attention of rows to the pages with these numbers."""
    if isinstance(policy, KascadeLayers) and policy.reads_all:
        numbers = all_pages(part.seen, kv.page_size, numbers.shape[1], part.page_table.shape[1])
    tables = tables_of(numbers, part.page_table, part.seen, kv.page_size, kv.k.shape[1])
    below = policy.skip_below(part.seen)
    return attention(part.q, tables) if below is None else attention(part.q, tables, below)


def _over_units(policy: Policy, page_size: int) -> Callable[..., Any]:
    """The loop over the rows that select together."""
    return functools.partial(_over_pages, page_size=page_size) if policy.unites_rows else _over


def _over[T](wanted: Array, function: Callable[[Rows, Array], T], rows: Rows, out: T) -> T:
    """`out` with what the function gives for the wanted rows: of some of them at a time, and of where these are."""
    num_rows = wanted.shape[0]
    size = min(num_rows, 8 if target_device().platform == "cpu" else 64)
    order = jnp.pad(jnp.argsort(~wanted, stable=True), (0, size))
    count = jnp.sum(wanted)

    def turn(i: Array, out: T) -> T:
        at = jax.lax.dynamic_slice_in_dim(order, i * size, size)
        is_row = i * size + jnp.arange(size) < count
        part = Rows(rows.q[at], rows.region, rows.sequence[at], jnp.where(is_row, rows.seen[at], 0))
        to = jnp.where(is_row, at, num_rows)
        return jax.tree.map(lambda x, y: x.at[to].set(y.astype(x.dtype), mode="drop"), out, function(part, at))

    return jax.lax.fori_loop(0, -(-count // size), turn, out)


def _over_pages[T](wanted: Array, function: Callable[[Rows, Array], T], rows: Rows, out: T, *, page_size: int) -> T:
    """As `_over`, of the wanted rows of a sequence whose own page is the same: all of them at a time."""
    num_rows = wanted.shape[0]
    own = jnp.where(wanted, rows.sequence, -1), (rows.seen - 1) // page_size
    begins = wanted & functools.reduce(jnp.logical_or, [jnp.diff(x, prepend=-2) != 0 for x in own])
    order = jnp.argsort(~begins, stable=True)

    def turn(i: Array, out: T) -> T:
        at = order[i] + jnp.arange(page_size)
        here = jnp.minimum(at, num_rows - 1)
        is_row = (at < num_rows) & functools.reduce(jnp.logical_and, [x[here] == x[order[i]] for x in own])
        part = Rows(rows.q[here], rows.region, rows.sequence[here], jnp.where(is_row, rows.seen[here], 0))
        to = jnp.where(is_row, at, num_rows)
        return jax.tree.map(lambda x, y: x.at[to].set(y.astype(x.dtype), mode="drop"), out, function(part, here))

    return jax.lax.fori_loop(0, jnp.sum(begins), turn, out)
