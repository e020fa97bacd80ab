"""Every implementation against the definition; the kernel in Pallas' interpreter where there is no GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels.top_pages import mosaic_gpu, reference, top_pages

ON_GPU = jax.devices()[0].platform == "gpu"
need_interpreter = pytest.mark.skipif(
    not ON_GPU and jax.__version_info__ < (0, 12), reason="before jax 0.12 the interpreter is not reliable"
)
CASES = {  # max_pages, most, pages of the rows
    "few": (20, 5, (20, 3, 5, 6, 0, 1)),
    "one": (20, 1, (20, 0, 1)),
    "all": (9, 40, (9, 2)),
    "several_blocks": (300, 64, (300, 130, 65)),
}


def inputs(name: str, equal: bool):
    """Whole numbers, many of them equal, or any; beyond the page before the last is NaN."""
    max_pages, most, num_pages = CASES[name]
    rng = np.random.default_rng(max_pages)
    scores = rng.standard_normal((len(num_pages), 2, max_pages)) * 10.0 ** rng.integers(-30, 30, (1, 1, max_pages))
    if equal:
        scores = rng.integers(-2, 3, scores.shape)
    scores = np.where(np.arange(max_pages) < np.array(num_pages)[:, None, None] - 1, scores, np.nan)
    return jnp.asarray(scores, jnp.float32), jnp.asarray(num_pages, jnp.int32), min(most, max_pages)


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch):
    """The interpreter takes long to compile what is unrolled."""
    if not ON_GPU:
        monkeypatch.setattr(mosaic_gpu, "PIECE", 4)


def run(implementation, scores, num_pages, most):
    if implementation == "mosaic_gpu" and not ON_GPU:
        return mosaic_gpu.top_pages(scores, num_pages, most, interpret=True)
    return jax.jit(functools.partial(top_pages, implementation=implementation), static_argnums=2)(
        scores, num_pages, most
    )


def all_cases():
    for name in CASES:
        for equal in (True, False):
            yield pytest.param("xla", name, equal)
            fast = ON_GPU or (name, equal) in (("few", True), ("several_blocks", False))
            yield pytest.param("mosaic_gpu", name, equal, marks=[need_interpreter, *[pytest.mark.full] * (not fast)])


@pytest.mark.parametrize(("implementation", "name", "equal"), [*all_cases()])
def test_the_last_page_and_the_best_are_selected(implementation, name, equal):
    scores, num_pages, most = inputs(name, equal)
    expected = reference.top_pages(scores, num_pages, most)
    np.testing.assert_array_equal(run(implementation, scores, num_pages, most), expected)


@pytest.mark.parametrize(
    "implementation", ["xla", pytest.param("mosaic_gpu", marks=[need_interpreter, pytest.mark.full])]
)
def test_infinite_scores_are_in_order_too(implementation):
    scores = jnp.asarray([[[-jnp.inf, 1.0, jnp.inf, -0.5, 3e38, 0.0]]], jnp.float32)
    np.testing.assert_array_equal(run(implementation, scores, jnp.asarray([6]), 3), [[[2, 4, 5]]])


def test_more_pages_than_registers_hold_are_refused_by_name():
    scores = jax.ShapeDtypeStruct((1, 1, 8193), jnp.float32)
    with pytest.raises(NotImplementedError, match="'mosaic_gpu': a sequence may have 8192 pages, got 8193"):
        jax.eval_shape(functools.partial(top_pages, most=4, implementation="mosaic_gpu"), scores, jnp.zeros(1, int))
