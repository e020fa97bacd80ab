"""Paged attention of prefill rows on NVIDIA Hopper.

How this works. The query tokens of each sequence are cut into *tiles*. A CUDA block, one a multiprocessor, takes one
tile and one query head after another, heavy ones first: half of the rows in each of two warpgroups, while a third
fetches keys and values by TMA, from the last block that the tile sees to the first, and on into the next tile. A
computing warpgroup starts the scores of the next block and the output of this one together, and works on the softmax of
the former while the tensor cores finish the latter (FlashAttention-3, arXiv 2407.08608). Pages in float8 are widened by
the warpgroup that fetches them: see `hopper.widen`.

TMA with a swizzle moves whole units of eight rows, so XLA gathers the queries into a view where each sequence begins at
a multiple of that; and output tiles begin at multiples of their size, so that a store never touches the rows of another
sequence, whence XLA gathers them back. A lone sequence is in place already.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.paged_attention.hopper import (
    INTERPRETER,
    LOG2_E,
    ROWS,
    SWIZZLED,
    Scoring,
    fetch_block,
    iota,
    over,
    page_ids,
    pages_type,
    scale_of,
    widen,
    zeros,
)
from jaxserve.pallas_kernels.paged_attention.prefill_softmax import TileOfWarpgroup
from jaxserve.pallas_kernels.paged_attention.prefill_work import TILE, UNIT, Options, Tile, Tiling, Work, rows_ahead
from jaxserve.pallas_kernels.paged_attention.types import FP8, AttentionBatch, KVCache


def paged_attention(
    q: Array,
    kv: KVCache,
    layer: int | Array,
    batch: AttentionBatch,
    scoring: Scoring,
    tiling: Tiling,
    work: Work,
    *,
    interpret: bool,
) -> tuple[Array, Array]:
    """Output `[T, N, H]` in q.dtype and float32 log-sum-exp `[T, N]`; see the package's docstring."""
    num_rows = q.shape[0]
    assert work.place.shape == (num_rows,), "prepared for another region"
    in_place = work.tile.shape[0] * TILE == num_rows  # one sequence
    options = Options(scoring=scoring, tiling=tiling, clears=in_place, interpret=interpret)
    out, lse = _attend(q if in_place else q[work.view], kv, layer, batch, work, options)
    if in_place:
        return out, lse.T
    assert batch.cu_q_lens is not None
    real = jnp.arange(num_rows) < batch.cu_q_lens[-1]
    out, lse = out[work.place], lse.T[work.place]
    return jnp.where(real[:, None, None], out, jnp.zeros_like(out)), jnp.where(real[:, None], lse, -jnp.inf)


def _attend(
    view: Array, kv: KVCache, layer: int | Array, batch: AttentionBatch, work: Work, options: Options
) -> tuple[Array, Array]:
    """Output `[tiles * TILE, N, H]` and log-sum-exp `[N, tiles * TILE]`."""
    (_, N, H), num_rows = view.shape, work.tile.shape[0] * TILE
    block, stages = options.tiling.block, options.tiling.stages
    ahead, pages_ahead = rows_ahead(block, stages, H, is_fp8=kv.k.dtype == FP8)
    pages = pages_type((pages_ahead, block, H), kv.k.dtype)
    arrivals = block // min(block, kv.page_size)
    fetched = plgpu.Barrier(num_arrivals=arrivals, num_barriers=pages_ahead) if pages else None
    arrived = plgpu.Barrier(num_arrivals=1 if pages else arrivals, num_barriers=stages)
    scratch = [
        plgpu.SMEM((ahead, 2, ROWS, H), view.dtype, transforms=SWIZZLED),
        plgpu.SMEM((2, ROWS, H), view.dtype, transforms=SWIZZLED) if ahead > 1 else None,
        plgpu.SMEM((stages, block, H), view.dtype, transforms=SWIZZLED),
        plgpu.SMEM((stages, block, H), view.dtype, transforms=SWIZZLED),
        plgpu.SMEM((2, ROWS), jnp.float32),
        plgpu.Barrier(num_arrivals=2, num_barriers=ahead),
        plgpu.Barrier(num_arrivals=2, num_barriers=ahead),
        arrived,
        arrived,
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        pages,
        pages,
        fetched,
        fetched,
    ]
    if options.interpret:
        scratch.append(plgpu.SMEM((2, ROWS, block), view.dtype, transforms=SWIZZLED))
    return plgpu.kernel(
        functools.partial(_attend_kernel, options=options),
        out_type=(
            jax.ShapeDtypeStruct((num_rows, N, H), view.dtype),
            jax.ShapeDtypeStruct((N, num_rows), jnp.float32),
        ),
        scratch_types=scratch,
        grid=(options.tiling.multiprocessors,),
        grid_names=("multiprocessor",),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name="paged_attention_prefill",
        interpret=INTERPRETER if options.interpret else None,
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512),
    )(
        view,
        kv.k,
        kv.v,
        kv.k_scale,
        kv.v_scale,
        batch.page_table,
        batch.kv_lens,
        work.tile,
        work.sequence,
        work.row,
        work.position,
        work.num_rows,
        work.num_tiles,
        jnp.asarray(layer, jnp.int32).reshape(1),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Cta:
    """One CUDA block as one of its warpgroups sees it."""

    q_gmem: Any  # [rows of the view, N, H]
    k_gmem: Any  # [L, P, page_size, K, H]
    v_gmem: Any
    k_scale_gmem: Any  # f32 [L, K], or None
    v_scale_gmem: Any
    table_gmem: Any  # i32 [S, max_pages]
    lens_gmem: Any  # i32 [S]
    work_gmem: tuple  # i32 [tiles] each: tile, sequence, row, position, num_rows of Work
    num_tiles_gmem: Any  # i32 [1]
    layer_gmem: Any  # i32 [1]
    out_gmem: Any  # [tiles * TILE, N, H]
    lse_gmem: Any  # f32 [N, tiles * TILE]
    q_smem: Any  # [tiles ahead, 2, ROWS, H]
    out_smem: Any  # [2, ROWS, H]; None: outputs take the place of their queries
    k_smem: Any  # [stages, block, H]
    v_smem: Any
    lse_smem: Any  # f32 [2, ROWS]
    q_arrived: Any  # [tiles ahead]
    q_consumed: Any  # [tiles ahead]
    k_arrived: Any  # [stages]
    v_arrived: Any
    k_consumed: Any
    v_consumed: Any
    k_pages_smem: Any  # [blocks ahead, block, H], and barriers as many; None unless pages are in float8
    v_pages_smem: Any
    k_fetched: Any
    v_fetched: Any
    weights_smem: Any  # [2, ROWS, block], only to interpret
    warpgroup: Array
    options: Options

    @property
    def block(self) -> int:
        return self.options.tiling.block

    def each_tile(self, body) -> None:
        """`body(tile, number, num_blocks)` for every tile of this CUDA block, with the numbers of tiles in use and of
        blocks before it.

        The items of a round become lighter from one multiprocessor to the next, so every second round runs backwards.
        """
        multiprocessors = self.options.tiling.multiprocessors
        num_tiles = self.work_gmem[0].shape[0] if self.options.clears else self.num_tiles_gmem[0]
        num_items = num_tiles * self.q_gmem.shape[1]

        def place(i):
            first = lax.axis_index("multiprocessor")
            return jnp.where(lax.rem(i, 2) == 0, first, multiprocessors - 1 - first)

        def step(i, before):
            number, num_blocks = before
            tile = self.tile(i * multiprocessors + place(i))
            body(tile, number, num_blocks)
            return number + jnp.int32(self.is_used(tile)), num_blocks + tile.count

        full = lax.div(num_items, multiprocessors)
        rest = num_items - full * multiprocessors
        lax.fori_loop(0, full + (place(full) < rest).astype(jnp.int32), step, (jnp.int32(0), jnp.int32(0)))

    def tile(self, item: Array) -> Tile:
        """Item by item: all heads of the heaviest tile, then those of the next."""
        N = self.q_gmem.shape[1]
        tile, sequence, row, position, num_rows = (field[lax.div(item, N)] for field in self.work_gmem)
        kv_len, window, skipped = self.lens_gmem[sequence], self.options.scoring.sliding_window, 0
        last = lax.div(jnp.minimum(kv_len, position + TILE) + (self.block - 1), self.block)
        if window is not None:
            skipped = lax.div(jnp.maximum(position - window + 1, 0), self.block)
        return Tile(
            tile=tile,
            head=lax.rem(item, N),
            sequence=sequence,
            row=row,
            position=position,
            num_rows=num_rows,
            kv_len=kv_len,
            last=last,
            count=jnp.where(num_rows == 0, 0, last - skipped),
        )

    def begin(self, tile: Tile, i: Array) -> Array:
        """The first position of the i-th block in use."""
        return (tile.last - 1 - i) * self.block

    def is_used(self, tile: Tile) -> Any:
        """Whether something is to be stored for the tile."""
        return True if self.options.clears else tile.count > 0

    def q_slot(self, number: Array) -> Array:
        return lax.rem(number, self.q_smem.shape[0])

    # The warpgroup that fetches

    def fetch(self, tile: Tile, number: Array, num_blocks: Array) -> None:
        self.fetch_queries(tile, number)

        def step(i, _):
            slot, where = lax.rem(num_blocks + i, self.options.tiling.stages), self.where(tile, i)
            for source, target, arrived, consumed in (
                (self.k_gmem, self.k_smem, self.k_arrived, self.k_consumed),
                (self.v_gmem, self.v_smem, self.v_arrived, self.v_consumed),
            ):

                @pl.when(num_blocks + i >= self.options.tiling.stages)
                def _wait(consumed=consumed):
                    plgpu.barrier_wait(consumed.at[slot])

                fetch_block(source.at[self.layer_gmem[0]], *where, target.at[slot], arrived.at[slot])

        lax.fori_loop(0, tile.count, step, None)

    def fetch_and_widen(self, tile: Tile, number: Array, num_blocks: Array) -> None:
        """Fetches blocks, and turns each into operands of matmuls some blocks later."""
        stages, ahead = self.options.tiling.stages, self.k_pages_smem.shape[0]

        def step(i, _):
            page_slot, slot = lax.rem(num_blocks + i, ahead), lax.rem(num_blocks + i + (stages - ahead), stages)
            for source, pages_smem, fetched, target, arrived, consumed in (
                (self.k_gmem, self.k_pages_smem, self.k_fetched, self.k_smem, self.k_arrived, self.k_consumed),
                (self.v_gmem, self.v_pages_smem, self.v_fetched, self.v_smem, self.v_arrived, self.v_consumed),
            ):
                pages = pages_smem.at[page_slot]

                @pl.when((i >= ahead) & (num_blocks + i >= stages + ahead))
                def _wait(consumed=consumed):
                    plgpu.barrier_wait(consumed.at[slot])

                @pl.when(i >= ahead)
                def _widen(pages=pages, fetched=fetched, target=target, arrived=arrived):
                    plgpu.barrier_wait(fetched.at[page_slot])
                    widen(pages, target.at[slot], plgpu.Layout.WGMMA_UPCAST_2X)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(arrived.at[slot])

                @pl.when(i < tile.count)
                def _fetch(source=source, pages=pages, fetched=fetched):
                    fetch_block(source.at[self.layer_gmem[0]], *self.where(tile, i), pages, fetched.at[page_slot])

            # Not before the tile's first blocks: the room for queries may be taken until the tile before is computed
            @pl.when(i == ahead - 1)
            def _fetch_queries():
                self.fetch_queries(tile, number)

        lax.fori_loop(0, tile.count + ahead, step, None)

    def fetch_queries(self, tile: Tile, number: Array) -> None:
        @pl.when(self.is_used(tile))
        def _():
            slot = self.q_slot(number)

            @pl.when(number >= self.q_smem.shape[0])
            def _wait():
                plgpu.barrier_wait(self.q_consumed.at[slot])

            for warpgroup in range(2):
                rows = pl.ds(tile.row * UNIT + warpgroup * ROWS, ROWS)
                there = self.q_smem.at[slot, warpgroup]
                plgpu.copy_gmem_to_smem(self.q_gmem.at[rows, tile.head], there, self.q_arrived.at[slot])

    def where(self, tile: Tile, i: Array) -> tuple[list[Array], Array, Array, Array]:
        """The i-th block, as `fetch_block` wants to know it."""
        begin = self.begin(tile, i)
        ids = page_ids(self.table_gmem, tile.sequence, tile.kv_len, begin, self.block, self.k_gmem.shape[2])
        return ids, begin, tile.kv_len, self.kv_head(tile)

    def kv_head(self, tile: Tile) -> Array:
        return lax.div(tile.head, self.q_gmem.shape[1] // self.k_gmem.shape[3])

    # The warpgroups that compute

    def compute(self, tile: Tile, number: Array, num_blocks: Array) -> None:
        attend = functools.partial(self.compute_rows, tile, number, num_blocks)
        pl.when(tile.count > 0)(functools.partial(attend, sees=True))
        if self.options.clears:
            pl.when(tile.count == 0)(functools.partial(attend, sees=False))

    def compute_rows(self, tile: Tile, number: Array, num_blocks: Array, *, sees: bool) -> None:
        slot = self.q_slot(number)
        queries = outputs = self.q_smem.at[slot, self.warpgroup]
        plgpu.barrier_wait(self.q_arrived.at[slot])
        if sees:
            k_scale, v_scale = (
                scale_of(scale_gmem, self.layer_gmem[0], self.kv_head(tile))
                for scale_gmem in (self.k_scale_gmem, self.v_scale_gmem)
            )
            rows = TileOfWarpgroup(cta=self, tile=tile, queries=queries, num_blocks=num_blocks, k_scale=k_scale)
            out, maximum, total = rows.attend()
            out, lse = out * over(v_scale / total, out), maximum / LOG2_E + jnp.log(total)
        else:
            out, lse = zeros(queries.shape, plgpu.Layout.WGMMA), zeros((ROWS,), plgpu.Layout.WGMMA.reduce(1))
        if self.out_smem is not None:
            plgpu.barrier_arrive(self.q_consumed.at[slot])
            outputs = self.out_smem.at[self.warpgroup]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # those of the tile before
        self.store(tile, outputs, out, lse)
        if self.out_smem is None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(self.q_consumed.at[slot])

    def store(self, tile: Tile, outputs: Any, out: Array, lse: Array) -> None:
        if self.options.clears:
            num_live = tile.num_rows - self.warpgroup * ROWS
            row = plgpu.broadcasted_iota(jnp.int32, lse.shape, 0, layout=plgpu.Layout.WGMMA.reduce(1))
            out = jnp.where(iota(out.shape, 0) < num_live, out, 0.0)
            lse = jnp.where(row < num_live, lse, -jnp.inf)
        lse_smem = self.lse_smem.at[self.warpgroup]
        outputs[...] = out.astype(outputs.dtype)
        lse_smem[...] = lse
        plgpu.commit_smem()
        rows = pl.ds(tile.tile * TILE + self.warpgroup * ROWS, ROWS)
        plgpu.copy_smem_to_gmem(outputs, self.out_gmem.at[rows, tile.head])
        plgpu.copy_smem_to_gmem(lse_smem, self.lse_gmem.at[tile.head, rows])


def _attend_kernel(
    q_gmem,
    k_gmem,
    v_gmem,
    k_scale_gmem,
    v_scale_gmem,
    table_gmem,
    lens_gmem,
    tile_gmem,
    sequence_gmem,
    row_gmem,
    position_gmem,
    num_rows_gmem,
    num_tiles_gmem,
    layer_gmem,
    out_gmem,
    lse_gmem,
    q_smem,
    out_smem,
    k_smem,
    v_smem,
    lse_smem,
    q_arrived,
    q_consumed,
    k_arrived,
    v_arrived,
    k_consumed,
    v_consumed,
    k_pages_smem,
    v_pages_smem,
    k_fetched,
    v_fetched,
    *weights_smem,
    options: Options,
):
    warpgroup = lax.axis_index("warpgroup")
    cta = _Cta(
        q_gmem=q_gmem,
        k_gmem=k_gmem,
        v_gmem=v_gmem,
        k_scale_gmem=k_scale_gmem,
        v_scale_gmem=v_scale_gmem,
        table_gmem=table_gmem,
        lens_gmem=lens_gmem,
        work_gmem=(tile_gmem, sequence_gmem, row_gmem, position_gmem, num_rows_gmem),
        num_tiles_gmem=num_tiles_gmem,
        layer_gmem=layer_gmem,
        out_gmem=out_gmem,
        lse_gmem=lse_gmem,
        q_smem=q_smem,
        out_smem=out_smem,
        k_smem=k_smem,
        v_smem=v_smem,
        lse_smem=lse_smem,
        q_arrived=q_arrived,
        q_consumed=q_consumed,
        k_arrived=k_arrived,
        v_arrived=v_arrived,
        k_consumed=k_consumed,
        v_consumed=v_consumed,
        k_pages_smem=k_pages_smem,
        v_pages_smem=v_pages_smem,
        k_fetched=k_fetched,
        v_fetched=v_fetched,
        weights_smem=weights_smem[0] if weights_smem else None,
        warpgroup=warpgroup,
        options=options,
    )

    @pl.when(warpgroup == 2)
    def _fetch():
        plgpu.set_max_registers(40 if k_pages_smem is None else 56, action="decrease")
        cta.each_tile(cta.fetch if k_pages_smem is None else cta.fetch_and_widen)

    @pl.when(warpgroup < 2)
    def _compute():
        plgpu.set_max_registers(232 if k_pages_smem is None else 224, action="increase")
        cta.each_tile(cta.compute)
        plgpu.wait_smem_to_gmem(0)
