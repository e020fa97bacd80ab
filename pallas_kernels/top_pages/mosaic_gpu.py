"""The pages with the best scores on NVIDIA Hopper, without a sort.

How this works. A CUDA block has the scores of one row and KV head in registers, as integers of the same order, and
finds the least one that is selected bit by bit, by counting how many are at least as large. Then each of several CUDA
blocks of the row writes the numbers of its own stretch of pages, from first to last, behind those that it has counted
before them. So they come out ascending.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.paged_attention.hopper import INTERPRETER
from jaxserve.pallas_kernels.paged_attention.mosaic_gpu import num_multiprocessors
from jaxserve.pallas_kernels.paged_attention.mosaic_gpu_plan import IN_EACH_WARP

THREADS = 128
PIECE = 32  # pages whose scores are read at once, when numbers are written
BLOCKS = 4  # CUDA blocks of a multiprocessor, about
FEW = 512  # pages that each warp counts by itself: no warp waits for another
MAX_PAGES = 8192  # 64 registers a thread
LEAST = -(2**31)


def unsupported(scores: Array) -> str | None:
    """Why the kernel cannot serve this call; None if it can."""
    if (pages := scores.shape[2]) > MAX_PAGES:
        return f"a sequence may have {MAX_PAGES} pages, got {pages}"
    return None


def top_pages(scores: Array, num_pages: Array, most: int, *, interpret: bool = False) -> Array:
    """As the package's `top_pages`.

    Raises:
        NotImplementedError: see `unsupported`.
    """
    if reason := unsupported(scores):
        raise NotImplementedError(f"top_pages: implementation 'mosaic_gpu': {reason}")
    T, K, max_pages = scores.shape
    keys = jnp.pad(ordered(scores), ((0, 0), (0, 0), (0, -max_pages % THREADS)))
    pieces = keys.shape[2] // PIECE
    each = -(-pieces // min(pieces, -(-BLOCKS * num_multiprocessors() // (T * K))))  # pieces of a block
    return plgpu.kernel(
        functools.partial(_select, each=each),
        out_type=jax.ShapeDtypeStruct((T, K, most), jnp.int32),
        grid=(T, K, -(-pieces // each)),
        grid_names=("row", "head", "block"),
        kernel_name="top_pages",
        interpret=INTERPRETER if interpret else None,
    )(keys, num_pages.astype(jnp.int32))


def _select(
    keys_gmem,  # i32 [T, K, pages], in the order of the scores
    num_pages_gmem,  # i32 [T]
    numbers_gmem,  # i32 [T, K, most]
    *,
    each: int,
):
    row, head, block = (lax.axis_index(name) for name in ("row", "head", "block"))
    (*_, size), most = keys_gmem.shape, numbers_gmem.shape[2]
    row_keys, numbers = keys_gmem.at[row, head], numbers_gmem.at[row, head]
    last = num_pages_gmem[row] - 1
    count = jnp.minimum(most, last + 1)  # that are selected; of those before the last one less
    wanted = jnp.maximum(count - 1, 0)
    layout = IN_EACH_WARP if size <= FEW else plgpu.Layout.WG_STRIDED((size,), vec_size=min(4, size // THREADS))
    index = plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout)
    keys = jnp.where(index < last, plgpu.load(row_keys, layout=layout, optimized=False), LEAST)

    def number_of(which: Array) -> Array:
        return jnp.where(which, 1.0, 0.0).sum().astype(jnp.int32)

    def bit(i: Array, least: Array) -> Array:
        higher = least + lax.shift_left(jnp.int32(1), 31 - i)  # of the first bit, it wraps around to 0
        return jnp.where(number_of(keys >= higher) >= wanted, higher, least)

    least = lax.fori_loop(0, 32, bit, jnp.int32(LEAST))
    begin = block * each * PIECE
    equals = wanted - number_of(keys > least)  # that are selected of those as large as the least one
    equal_before = number_of((keys == least) & (index < begin))
    before = number_of((keys > least) & (index < begin)) + jnp.minimum(equal_before, equals)

    def piece(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        place, equal = carry
        first = begin + i * PIECE
        for j, key in enumerate([row_keys[first + j] for j in range(PIECE)]):
            is_page, is_equal = first + j < last, key == least
            taken = is_page & ((key > least) | (is_equal & (equal < equals)))

            @pl.when(taken)
            def _write(place=place, j=j):
                numbers[place] = first + j

            place, equal = place + jnp.where(taken, 1, 0), equal + jnp.where(is_page & is_equal, 1, 0)
        return place, equal

    lax.fori_loop(0, jnp.minimum(each, size // PIECE - block * each), piece, (before, equal_before))

    @pl.when(block == 0)
    def _the_last_and_nothing():
        @pl.when(count > 0)
        def _():
            numbers[count - 1] = last

        def nothing(i: Array, _) -> None:
            numbers[count + i] = -1

        lax.fori_loop(0, most - count, nothing, None)


def ordered(scores: Array) -> Array:
    """Integers in the order of float32 numbers, all above LEAST."""
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    return jnp.maximum(jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits), LEAST + 1)
