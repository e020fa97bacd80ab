"""The work of a program is that of its matmuls, however they are wrapped."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.program_work import Work, work_of
from jaxserve.sharding.mesh import make_mesh, on_ranks

X, W = np.zeros((4, 8), np.float32), np.zeros((16, 8), np.float32)
ONCE = Work(2 * 4 * 16 * 8, 4 * (4 * 8 + 16 * 8 + 4 * 16))


def product(x, w):
    return x @ w.T


def in_a_loop(x, w):
    return jax.lax.fori_loop(0, 5, lambda _, total: total + product(x, w), jnp.zeros((4, 16)))


def in_a_branch(x, w):
    return jax.lax.cond(x[0, 0] > 0, product, lambda x, w: jnp.zeros((4, 16)), x, w)


def in_a_loop_of_unknown_length(x, w):
    return jax.lax.fori_loop(0, x[0, 0].astype(int), lambda _, total: total + product(x, w), jnp.zeros((4, 16)))


def on_two_ranks(x, w):
    return on_ranks(make_mesh(1, 2), product, lambda: ((jax.P(), jax.P("tp")), jax.P(None, "tp")))(x, w)


@pytest.mark.parametrize(
    ("function", "work"),
    [
        (product, ONCE),
        (jax.jit(product), ONCE),
        (in_a_loop, Work(5 * ONCE.flops, 5 * ONCE.matmul_bytes)),
        (in_a_branch, ONCE),
        (in_a_loop_of_unknown_length, ONCE),
        (on_two_ranks, Work(ONCE.flops // 2, 4 * (4 * 8 + 8 * 8 + 4 * 8))),
        (lambda x, w: x[:, None, :] @ w.T, Work(ONCE.flops, ONCE.matmul_bytes)),
        (lambda x, w: x + 1, Work()),
    ],
)
def test_work_counts_trips_and_ranks(function, work):
    assert work_of(jax.make_jaxpr(function)(X, W).jaxpr) == work


def test_a_kernel_tells_the_scalars_that_it_is_given():
    def kernel(table, more, x, out):
        out[...] = x[...] * table[0, 0].astype(jnp.float32)

    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(1,),
        in_specs=[pl.BlockSpec((8, 128), lambda i, *_: (0, 0))],
        out_specs=pl.BlockSpec((8, 128), lambda i, *_: (0, 0)),
    )
    call = pl.pallas_call(kernel, grid_spec=spec, out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32))
    scalars = np.zeros((3, 5), np.int32), np.zeros(7, np.int32)
    traced = jax.make_jaxpr(functools.partial(call, *scalars))(jnp.zeros((8, 128)))
    assert work_of(traced.jaxpr) == Work(smem_bytes=4 * (15 + 7))
