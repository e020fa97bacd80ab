"""Rows of bfloat16 as words of 32 bits, on TPU.

There a row of a matrix in bfloat16 lies in halves of words that it shares with its neighbour, and no copy can take it
alone. So rows that are copied one by one are matrices `[word_rows, 128]` of words: word i of a row has its number i in
the lower half, and the one that is half a row later in the upper half.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

LANES = 128
UPPER = 0xFFFF0000


def word_rows(D: int) -> int:
    """Rows of words of a row: as many as are needed, up to a multiple of 8, as registers have."""
    return -(-D // (2 * LANES * 8)) * 8


def pack(x: Array) -> Array:
    """`[T, D]` in bfloat16 as u32 `[T * word_rows, 128]`."""
    low, high = (lax.bitcast_convert_type(half, jnp.uint16).astype(jnp.uint32) for half in jnp.split(x, 2, axis=1))
    words = (low | (high << 16)).reshape(x.shape[0], -1, LANES)
    return jnp.pad(words, ((0, 0), (0, word_rows(x.shape[1]) - words.shape[1]), (0, 0))).reshape(-1, LANES)


def unpack(words: Array, D: int) -> Array:
    """What `pack` was given."""
    words = words.reshape(-1, word_rows(D), LANES)[:, : D // (2 * LANES)].reshape(-1, D // 2)
    halves = (words.astype(jnp.uint16), (words >> 16).astype(jnp.uint16))
    return jnp.concatenate([lax.bitcast_convert_type(half, jnp.bfloat16) for half in halves], axis=1)


def halves_of(words: Array) -> tuple[Array, Array]:
    """The numbers in the lower and in the upper halves, in float32."""
    low, high = words << 16, words & jnp.uint32(UPPER)
    return lax.bitcast_convert_type(low, jnp.float32), lax.bitcast_convert_type(high, jnp.float32)


def words_of(low: Array, high: Array) -> Array:
    """Words with these numbers, which are rounded to bfloat16."""
    low, high = (
        lax.bitcast_convert_type(half.astype(jnp.bfloat16).astype(jnp.float32), jnp.uint32) for half in (low, high)
    )
    return (low >> 16) | high


def load(words: Any, first: Any, rows: Any) -> None:
    """Rows of words in vector memory, from row `first` on, into `[rows, D]` in bfloat16."""
    (num_rows, D), stride = rows.shape, word_rows(rows.shape[1])
    for column in range(0, D // 2, LANES):
        low, high = halves_of(words[pl.ds(first * stride + column // LANES, num_rows, stride=stride), :])
        rows[:, column : column + LANES] = low.astype(rows.dtype)
        rows[:, D // 2 + column : D // 2 + column + LANES] = high.astype(rows.dtype)


def store(rows: Array, words: Any, first: Any) -> None:
    """`[rows, D]` in float32 to rows of words in vector memory, from row `first` on."""
    (num_rows, D), stride = rows.shape, word_rows(rows.shape[1])
    for column in range(0, D // 2, LANES):
        low, high = (rows[:, at : at + LANES] for at in (column, D // 2 + column))
        words[pl.ds(first * stride + column // LANES, num_rows, stride=stride), :] = words_of(low, high)
