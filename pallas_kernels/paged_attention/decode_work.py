"""How the work of decode attention is cut up and shared out: see `mosaic_gpu_decode`.

These functions take arrays, when a step is planned, and scalars, inside a kernel.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxserve.pallas_kernels.paged_attention.hopper import Scoring
from jaxserve.pallas_kernels.paged_attention.types import AttentionBatch

EVERYTHING = 2**30  # a window that nothing is out of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    block: int  # positions in a unit
    stages: int  # units of a worker in shared memory
    pairs: int  # workers in a CUDA block
    blocks: int  # CUDA blocks

    @property
    def workers(self) -> int:
        return self.blocks * self.pairs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What the kernels know when they are compiled, besides shapes."""

    q_len: int  # query rows of a sequence
    group: int  # query heads of a KV head, padded
    shared: int  # KV heads whose query heads lie in the rows of one tile; each drops the rows of the others
    as_they_are: bool  # the queries are such tiles already
    scoring: Scoring
    tiling: Tiling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
    """One unit of work: scalars in a kernel, one value a worker in a plan."""

    sequence: Array
    head: Array
    at: Array  # block
    kv_len: Array
    first: Array  # block of the sequence that its rows see
    last: Array  # exclusive


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """How the units are shared out: the same for every layer of a kind."""

    ends: Array  # i32 [B], units of the sequences up to and with this one
    count: Array  # i32 [workers], units of each worker
    begin: Unit  # i32 [workers], the first of them
    sliding_window: int | None = dataclasses.field(metadata={"static": True})  # that this holds for


def plan(batch: AttentionBatch, num_kv_heads: int, sliding_window: int | None, tiling: Tiling) -> Work:
    """Equal runs of units for all workers."""
    kv_lens, K = batch.kv_lens, num_kv_heads
    first, last = block_range(kv_lens, batch.max_q_len, sliding_window, tiling.block)
    size = last - first
    ends = K * jnp.cumsum(size, dtype=jnp.int32)
    share, rest = lax.div(ends[-1], tiling.workers), lax.rem(ends[-1], tiling.workers)
    starts = _first_unit(jnp.arange(tiling.workers + 1, dtype=jnp.int32), share, rest)
    sequence = jnp.searchsorted(ends, starts[:-1], side="right", method="compare_all").astype(jnp.int32)
    sequence = jnp.minimum(sequence, kv_lens.shape[0] - 1)  # beyond: a worker without work
    offset = starts[:-1] - (ends - K * size)[sequence]
    begin = Unit(
        sequence=sequence,
        head=lax.div(offset, size[sequence]),
        at=first[sequence] + lax.rem(offset, size[sequence]),
        kv_len=kv_lens[sequence],
        first=first[sequence],
        last=last[sequence],
    )
    return Work(ends=ends, count=starts[1:] - starts[:-1], begin=begin, sliding_window=sliding_window)


def block_range(kv_lens: Array, q_len: int, sliding_window: int | None, block: int) -> tuple[Array, Array]:
    """Blocks `[first, last)` that the rows of a sequence see; an empty sequence has one, of the null page."""
    window = EVERYTHING if sliding_window is None else sliding_window
    first = lax.div(jnp.maximum(kv_lens - q_len + 1 - window, 0), block)
    return first, jnp.maximum(lax.div(kv_lens + (block - 1), block), first + 1)


def _first_unit(worker: Array, share: Array, rest: Array) -> Array:
    """The first `rest` workers take `share + 1` units, the others `share`."""
    return worker * share + jnp.minimum(worker, rest)


def worker_of(unit: Array, share: Array, rest: Array) -> Array:
    """The worker that has `unit`."""
    large = rest * (share + 1)
    return jnp.where(unit < large, lax.div(unit, share + 1), rest + lax.div(unit - large, jnp.maximum(share, 1)))


def padded_group(group: int, head_dim: int) -> int:
    """Query heads of a KV head as the kernels see them: a vector of one warpgroup is at least 128 long."""
    return group + group % 2 if head_dim < 128 else group
