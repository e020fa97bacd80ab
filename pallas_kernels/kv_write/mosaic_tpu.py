"""Copies rows of keys and values to their pages, in place, on TPU.

How this works. The scalar unit walks over the rows and starts a copy from memory to memory for each, or for `RUN` rows
at once where they follow each other in a page, as those of a prompt do; at the end it waits for all. Nothing passes
through the vector unit: a step of 8,192 rows takes 1,024 copies. Rows whose page is 0, the null page, are left out:
padding, and on a mesh those that other ranks hold.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels.paged_attention.mosaic_tpu import unsupported_rows
from jaxserve.pallas_kernels.paged_attention.types import KVCache

RUN = 16  # rows
MAX_ROWS = 64 * 1024  # their pages and offsets take 512 KiB of the scalar memory, which has 1 MiB


def unsupported(kv: KVCache, num_rows: int) -> str | None:
    """Why the kernel cannot write so many rows to this cache; None if it can."""
    if num_rows > MAX_ROWS:
        return f"a step may have {MAX_ROWS} rows, got {num_rows}"
    if kv.k.shape[3] == 1:
        return "positions of one row lie in tiles of memory with others, and a tile is the least that can be copied"
    return unsupported_rows(kv)


def kv_write(
    rows: tuple[Array, Array],  # keys and values [T, *position], in the dtype of the pages
    pages: tuple[Array, Array],  # [L, P, page_size, *position]
    layer: int | Array,
    page_ids: Array,  # i32 [T]
    page_offsets: Array,  # i32 [T]
    *,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """The pages of keys and of values with each row at its page and offset; those of page 0 are not written."""
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(1,),
            in_specs=[anywhere] * 4,
            out_specs=[anywhere] * 2,
            scratch_shapes=[pltpu.SemaphoreType.DMA((2,))],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pages],
        input_output_aliases={5: 0, 6: 1},
        interpret=interpret,
        name="kv_write",
    )(jnp.asarray(layer, jnp.int32).reshape(1), page_ids, page_offsets, *rows, *pages)


def _kernel(layer: Any, page_ids: Any, offsets: Any, k: Any, v: Any, _k: Any, _v: Any, *refs: Any) -> None:
    *pages, arrived = refs
    num_rows = k.shape[0]

    def copies(t: Any, page: Any, offset: Any, count: int) -> list[Any]:
        return [
            pltpu.make_async_copy(
                rows.at[pl.ds(t, count)], to.at[layer[0], page, pl.ds(offset, count)], arrived.at[int(count > 1)]
            )
            for rows, to in zip((k, v), pages, strict=True)
        ]

    def step(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        t, runs, singles = state
        page, offset = page_ids[t], offsets[t]
        last = jnp.minimum(t + RUN, num_rows) - 1
        # A page but 0 holds one sequence's rows, so that between two of them so far apart there are no others
        run = (page > 0) & (last == t + RUN - 1) & (page_ids[last] == page) & (offsets[last] == offset + RUN - 1)
        single = (page > 0) & ~run
        for condition, count in ((run, RUN), (single, 1)):
            if count <= num_rows:

                @pl.when(condition)
                def _(count: int = count) -> None:
                    for copy in copies(t, page, offset, count):
                        copy.start()

        return t + jnp.where(run, RUN, 1), runs + run.astype(jnp.int32), singles + single.astype(jnp.int32)

    zero = jnp.int32(0)
    _, runs, singles = lax.while_loop(lambda state: state[0] < num_rows, step, (zero, zero, zero))
    for times, count in ((runs, RUN), (singles, 1)):
        if count <= num_rows:

            def wait(_: Any, carry: None, count: int = count) -> None:
                for copy in copies(0, 0, 0, count):
                    copy.wait()

            lax.fori_loop(0, times, wait, None)
