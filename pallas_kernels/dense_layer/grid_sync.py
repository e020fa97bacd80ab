"""What Pallas does not have: CUDA blocks that wait for each other, and a store of some rows of a tile."""

from typing import Any

import numpy as np
from jax import Array
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

_inline: Any = plgpu.inline_mgpu  # its type says that the context is still to be given


def signal(counter: Any) -> None:
    """Adds one to the counter i32 [2], when all that the warpgroup has written can be seen by other blocks."""

    @_inline(arg_types=(plgpu.RefType(),))
    def add_one(ctx, counter):
        del ctx
        _order_with_tma()
        mgpu.utils.warpgroup_barrier()
        mgpu.utils.SemaphoreRef(mgpu.utils.memref_ptr(counter)).signal(1, memory_scope="gpu")

    add_one(counter)


def wait(counter: Any, target: Array) -> None:
    """Until the counter has reached `target`; then what was written before can be read, by TMA too."""

    @_inline(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT))
    def until(ctx, counter, target):
        del ctx
        semaphore = mgpu.utils.SemaphoreRef(mgpu.utils.memref_ptr(counter))
        semaphore.wait(target.registers.item(), decrement=False, memory_scope="gpu")
        _order_with_tma()

    until(counter, target)


def _order_with_tma() -> None:
    mgpu.utils.inline_ptx("fence.proxy.async;", has_side_effects=True)


def store_rows(values: Array, ref: Any, num_rows: int, *, interpret: bool) -> None:
    """Writes the first rows of a tile `[64, columns]` straight from registers."""
    if interpret:
        ref[...] = values[:num_rows]
        return

    @_inline(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))
    def store(ctx, values, ref):
        del ctx
        limit = mgpu.c(num_rows, ir.IndexType.get())
        places = zip(values.layout.thread_idxs(values.shape), np.ndindex(values.registers.shape), strict=True)
        for index, register in places:
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, index[0], limit)):
                vector.store(values.registers[register], ref, index)

    store(values, ref)
