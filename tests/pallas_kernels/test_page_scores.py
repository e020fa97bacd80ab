"""Every implementation against the definition; the kernel in Pallas' interpreter where there is no GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels.page_scores import mosaic_gpu, page_scores, reference

LAYER, ON_GPU = 1, jax.devices()[0].platform == "gpu"
need_interpreter = pytest.mark.skipif(
    not ON_GPU and jax.__version_info__ < (0, 12), reason="before jax 0.12 the interpreter is not reliable"
)
# K, width, parts and pages of each row; KV heads that are no multiple of the warps, and a table of many turns
CASES = {
    "eight_heads": (8, 256, 1, (9, 0, 1, 17)),
    "parts": (2, 128, 4, (5, 3)),
    "three_heads": (3, 128, 1, (20,)),
    "one_head": (1, 64, 2, (7, 2)),
    "wide": (4, 512, 1, (3, 3)),
    "many": (4, 256, 1, (150, 1, 90)),
}


def inputs(name: str, dtype):
    """What no row reads is NaN; entries of tables beyond their pages are wild; one page is of another rank."""
    K, width, parts, lengths = CASES[name]
    rng = np.random.default_rng(len(name))
    max_pages, total = max(lengths) + 2, sum(lengths)
    ids = rng.permutation(total) + 1
    table = np.full((len(lengths), max_pages), 2**30)
    for row, part in zip(table, np.split(ids, np.cumsum(lengths)[:-1]), strict=True):
        row[: len(part)] = part
    meta = np.full((2, total + 2, K, parts * width), np.nan, np.float32)
    meta[LAYER, ids] = rng.standard_normal((total, K, parts * width))
    table[0, 1] = -1
    probe = rng.standard_normal((len(lengths), K, width))
    arrays = jnp.asarray(probe, jnp.float32), jnp.asarray(meta, dtype), jnp.int32(LAYER)
    return *arrays, jnp.asarray(table, jnp.int32), jnp.asarray(lengths, jnp.int32)


def run(implementation, arguments):
    if implementation == "mosaic_gpu" and not ON_GPU:
        return np.asarray(mosaic_gpu.page_scores(*arguments, interpret=True))
    return np.asarray(jax.jit(functools.partial(page_scores, implementation=implementation))(*arguments))


def error(got, expected) -> float:
    """The largest, in units of float32's rounding times the length of the sums and their size."""
    seen = ~np.isnan(expected)
    bound = 64 * float(jnp.finfo(jnp.float32).eps) * np.abs(expected[seen]).max()
    return float(np.abs(got - expected)[seen].max() / bound)


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch):
    if not ON_GPU:
        monkeypatch.setattr(mosaic_gpu, "num_multiprocessors", lambda: 1)


def all_cases():
    for name in CASES:
        for dtype, label in ((jnp.float32, "f32"), (jnp.bfloat16, "bf16")):
            yield pytest.param("xla", name, dtype, id=f"xla-{name}-{label}")
        marks = [] if ON_GPU or name in ("parts", "many") else [pytest.mark.full]
        label = f"mosaic_gpu-{name}"
        yield pytest.param("mosaic_gpu", name, jnp.bfloat16, id=label, marks=[need_interpreter, *marks])


@pytest.mark.parametrize(("implementation", "name", "dtype"), [*all_cases()])
def test_scores_are_those_of_the_pages_in_the_table(implementation, name, dtype):
    arguments = inputs(name, dtype)
    assert error(run(implementation, arguments), reference.page_scores(*arguments)) < 1


WRONG = {
    "zeros": lambda probe, meta, layer, table, n: (jnp.zeros_like(probe), meta, layer, table, n),
    "another_head": lambda probe, meta, layer, table, n: (jnp.roll(probe, 1, axis=1), meta, layer, table, n),
    "next_page": lambda probe, meta, layer, table, n: (probe, meta, layer, jnp.roll(table, 1, axis=1), n),
    "a_page_of_another_rank": lambda probe, meta, layer, table, n: (probe, meta, layer, jnp.abs(table), n),
    "half_of_a_part": lambda probe, meta, layer, table, n: (probe.at[..., 64:].set(0), meta, layer, table, n),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_plausible_wrong_answer_is_out_of_bounds(wrong):
    probe, meta, layer, table, num_pages = inputs("parts", jnp.float32)
    arguments = probe, jnp.nan_to_num(meta, nan=0.5), layer, jnp.minimum(table, 8), num_pages
    got = reference.page_scores(*WRONG[wrong](*arguments))
    assert error(got, reference.page_scores(*arguments)) > 1


@pytest.mark.parametrize(
    ("width", "dtype", "reason"),
    [(48, jnp.bfloat16, "multiple of 256 numbers .* got 48"), (64, jnp.float32, "bfloat16 or float16, got float32")],
)
def test_mosaic_gpu_says_what_it_cannot_do(width, dtype, reason):
    probe, meta = jnp.zeros((1, 1, width)), jnp.zeros((1, 1, 1, width), dtype)
    table = jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(NotImplementedError, match=f"'mosaic_gpu': .*{reason}"):
        page_scores(probe, meta, 0, table, table[0], implementation="mosaic_gpu")
