"""The choices of 64 tokens, as one warpgroup makes and keeps them.

How this works. Tokens are the rows of the matmuls of a warpgroup, experts its columns, 64 at a time: what is known of
all does not fit the registers. Choices are made by taking the largest logit `top_k` times. Sums over tokens, of how
many pick an expert, are products with matrices of ones; all numbers are small enough to be exact.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.paged_attention.hopper import ROWS, SWIZZLED, iota, over, zeros

BY_ROW = plgpu.Layout.WGMMA.reduce(1)
NONE = 2.0**20  # no expert


def square(*shape: int) -> Any:
    """An operand of a matmul."""
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=SWIZZLED)


@dataclasses.dataclass(frozen=True)
class Choices:
    # f32 [E / ROWS, ROWS, ROWS]: Mosaic swizzles it, and a slice of columns would lose how (jax 0.11, 0.12)
    logits_smem: Any
    largest_smem: Any  # f32 [top_k, ROWS], the logits of the choices
    chosen_smem: Any  # f32 [top_k, ROWS], their experts; NONE where that is -inf or not a number, or no token
    picks_smem: Any  # [ROWS, E], one where a token picks an expert
    tokens_smem: Any  # [2, ROWS, ROWS], ones up to the diagonal, and ones
    real_smem: Any  # f32 [ROWS], one where a token may pick experts

    @staticmethod
    def scratch(num_experts: int, top_k: int) -> tuple[Any, ...]:
        return (
            plgpu.SMEM((num_experts // ROWS, ROWS, ROWS), jnp.float32),
            plgpu.SMEM((top_k, ROWS), jnp.float32),
            plgpu.SMEM((top_k, ROWS), jnp.float32),
            square(ROWS, num_experts),
            square(2, ROWS, ROWS),
            plgpu.SMEM((ROWS,), jnp.float32),
        )

    @property
    def top_k(self) -> int:
        return self.chosen_smem.shape[0]

    @property
    def parts(self) -> range:
        """The first of each 64 experts."""
        return range(0, self.picks_smem.shape[1], ROWS)

    @property
    def row(self) -> Array:
        return iota((ROWS, ROWS), 0).astype(jnp.float32)

    @property
    def column(self) -> Array:
        return iota((ROWS, ROWS), 1).astype(jnp.float32)

    def make(self, arrived: Any) -> None:
        """Chooses from the logits of each real token, which `fetch` has begun to bring."""
        column, parts = self.column, self.parts
        self.tokens_smem[0] = ones(column <= self.row)
        self.tokens_smem[1] = ones(column >= 0.0)
        plgpu.barrier_wait(arrived)

        def choose(j: Array, left: list[Array]) -> list[Array]:
            value = functools.reduce(jnp.maximum, [some.max(axis=1) for some in left])
            found = [
                p - jnp.where(s == over(value, s), -column, -NONE).max(axis=1) for p, s in zip(parts, left, strict=True)
            ]
            expert = functools.reduce(jnp.minimum, found)  # of equal logits the first
            self.largest_smem[j], self.chosen_smem[j] = value, jnp.where(value > -jnp.inf, expert, NONE)
            return [jnp.where(self.is_expert(expert, p), -jnp.inf, s) for p, s in zip(parts, left, strict=True)]

        left = lax.fori_loop(0, self.top_k, choose, self.logits())
        for part, some, before in zip(parts, left, self.logits(), strict=True):
            picked = (some == -jnp.inf) & (before > -jnp.inf)
            self.picks_smem[:, pl.ds(part, ROWS)] = ones(picked)
        plgpu.commit_smem()

    @staticmethod
    def barrier(num_experts: int) -> Any:
        """Of what `fetch` brings."""
        return plgpu.Barrier(num_arrivals=num_experts // ROWS + 1)

    def fetch(self, logits_gmem: Any, begin: Array | int, real_gmem: Any, arrived: Any) -> None:
        """Begins to bring the logits of the tokens from `begin` on, f32 `[T, E]`, and which of these are real, as
        `by_block` has them.
        """
        num_tokens = min(ROWS, logits_gmem.shape[0])
        plgpu.copy_gmem_to_smem(real_gmem, self.real_smem, arrived)
        for i, part in enumerate(self.parts):
            there = self.logits_smem.at[i, pl.ds(0, num_tokens)]
            plgpu.copy_gmem_to_smem(logits_gmem.at[pl.ds(begin, num_tokens), pl.ds(part, ROWS)], there, arrived)

    def logits(self) -> list[Array]:
        """-inf where there is no real token."""
        smem, layout = self.logits_smem, plgpu.Layout.WGMMA
        found = [plgpu.load(smem.at[i], layout=layout, optimized=False) for i in range(smem.shape[0])]
        real = plgpu.load(self.real_smem, layout=BY_ROW)
        return [jnp.where(over(real, some) > 0.0, some, -jnp.inf) for some in found]

    def is_expert(self, expert: Array, part: int) -> Array:
        column = self.column
        return column == over(expert - part, column)

    def counts(self, part: int | Array) -> Array:
        """How many tokens pick each expert, the same in every row."""
        return product(self.tokens_smem.at[1], self.picks_smem.at[:, pl.ds(part, ROWS)])

    def ranks(self, part: int | Array) -> Array:
        """How many tokens before each one pick the expert, if this one does."""
        return product(self.tokens_smem.at[0], self.picks_smem.at[:, pl.ds(part, ROWS)]) - 1.0

    def own(self, j: Array, values: list[Array], none: float) -> Array:
        """For each token the value of its j-th expert, or `none`, as i32."""
        expert = by_row(self.chosen_smem, j)
        found = [
            jnp.where(self.is_expert(expert, p), s, 0.0).sum(axis=1) for p, s in zip(self.parts, values, strict=True)
        ]
        return jnp.where(expert < NONE, functools.reduce(jnp.add, found), none).astype(jnp.int32)

    def store_weights(self, weights_smem: Any, normalize: bool) -> None:
        """Softmax over all logits, or over those of the choices, f32 `[top_k, ROWS]`; zero for no choice."""
        largest = by_row(self.largest_smem, 0)

        def weight(j: Array) -> Array:
            return jnp.exp(by_row(self.largest_smem, j) - largest)

        if normalize:
            total = lax.fori_loop(0, self.top_k, lambda j, total: total + weight(j), zeros((ROWS,), BY_ROW))
        else:
            total = functools.reduce(jnp.add, [jnp.exp(x - over(largest, x)).sum(axis=1) for x in self.logits()])

        def store(j: Array, _) -> None:
            weights_smem[j] = jnp.where(by_row(self.chosen_smem, j) < NONE, weight(j) / total, 0.0)

        lax.fori_loop(0, self.top_k, store, None)


def by_block(real: Array) -> Array:
    """f32 `[blocks, ROWS]`, one for each token of a block that is real and not of the block before.

    The last block has the last 64 tokens, where there are so many.
    """
    T, num_blocks = real.shape[0], -(-real.shape[0] // ROWS)
    cut = min(T, (num_blocks - 1) * ROWS or ROWS)
    missing = jnp.zeros(num_blocks * ROWS - T, bool)
    return jnp.concatenate([real[:cut], missing, real[cut:]]).astype(jnp.float32).reshape(num_blocks, ROWS)


def by_row(smem: Any, j: int | Array) -> Array:
    return plgpu.load(smem.at[j], layout=BY_ROW)


def ones(where: Array) -> Array:
    return jnp.where(where, 1.0, 0.0).astype(jnp.bfloat16)


def product(a_smem: Any, b_smem: Any) -> Array:
    def multiply(ref):
        plgpu.wgmma(ref, a_smem, b_smem)
        return ref[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((a_smem.shape[0], b_smem.shape[1])))
