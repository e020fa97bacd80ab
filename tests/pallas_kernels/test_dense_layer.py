import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels.dense_layer import DenseWeights, cuts, dense_layer, mosaic_gpu, reference, unsupported

on_gpu = jax.devices()[0].platform == "gpu"
runs = pytest.mark.skipif(
    not on_gpu and jax.__version_info__ < (0, 12), reason="before jax 0.12 the interpreter is not reliable"
)
# R, D, N H, F, QKV: outputs that are split along their inputs, a width that is no power of two
SHAPES = [(8, 512, 256, 128, 512), (16, 512, 128, 384, 1024)]
EPS, OFFSET, L = 0.1, 0.5, 3


def inputs(shape, dtype=jnp.bfloat16):
    R, D, NH, F, QKV = shape
    rng = np.random.default_rng(D + R)

    def normal(*size, scale=1.0):
        return jnp.asarray(scale * rng.standard_normal(size), dtype)

    weights = DenseWeights(
        input_norm=normal(L, D),
        qkv=normal(L, QKV, D, scale=D**-0.5),
        o=normal(L, D, NH, scale=NH**-0.5),
        post_norm=normal(L, D),
        gate_up=normal(L, 2 * F, D, scale=D**-0.5),
        down=normal(L, D, F, scale=F**-0.5),
    )
    return normal(R, NH), normal(R, D), weights


def errors(got, expected) -> list[float]:
    """The largest error of each output, in units of the largest value's rounding to bfloat16."""
    pairs = zip(got, expected, strict=True)
    return [float(np.abs(np.asarray(a, np.float32) - b).max() / np.abs(b).max() * 2**8) for a, b in pairs]


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch):
    """For the cuts of an interpreted kernel to be as wide as those of a large model."""
    if not on_gpu:
        monkeypatch.setattr(mosaic_gpu, "num_multiprocessors", lambda: 8)


def run(attended, x, weights, layer=1, progress=None):
    progress = jnp.zeros(2, jnp.int32) if progress is None else progress
    call = jax.jit(dense_layer, static_argnames=("eps", "offset", "interpret"))
    return call(attended, x, weights, jnp.int32(layer), progress, eps=EPS, offset=OFFSET, interpret=not on_gpu)


@runs
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_what_the_definition_says(shape):
    attended, x, weights = inputs(shape)
    expected = reference.dense_layer(attended, x, weights, 1, eps=EPS, offset=OFFSET)
    assert max(errors(run(attended, x, weights)[:2], expected)) < 2


@runs
def test_a_later_call_goes_on_where_an_earlier_one_ended():
    attended, x, weights = inputs(SHAPES[0])
    *_, progress = run(attended, x, weights, layer=0)
    got = run(attended, x, weights, layer=1, progress=progress)
    expected = reference.dense_layer(attended, x, weights, 1, eps=EPS, offset=OFFSET)
    assert max(errors(got[:2], expected)) < 2


@runs
def test_after_the_last_layer_only_the_residual_stream_is_new():
    attended, x, weights = inputs(SHAPES[0])
    longer = DenseWeights(*(jnp.concatenate([leaf, leaf[:1]]) for leaf in weights))
    expected, _ = reference.dense_layer(attended, x, longer, L - 1, eps=EPS, offset=OFFSET)
    assert errors(run(attended, x, weights, layer=L - 1)[:1], [expected])[0] < 2


@pytest.mark.parametrize(
    "wrong",
    ["no residual", "up is gate", "norm of this layer", "norms swapped", "offset", "eps", "layer"],
)
def test_a_plausible_wrong_answer_is_out_of_bounds(wrong):
    attended, x, weights = inputs(SHAPES[0])
    right = reference.dense_layer(attended, x, weights, 1, eps=EPS, offset=OFFSET)
    layer = 0 if wrong == "layer" else 1
    eps, offset = 0.0 if wrong == "eps" else EPS, 0.0 if wrong == "offset" else OFFSET
    gate, up = jnp.split(weights.gate_up, 2, axis=1)
    if wrong == "no residual":
        x = jnp.zeros_like(x)
    elif wrong == "up is gate":
        weights = weights._replace(gate_up=jnp.concatenate([up, gate], axis=1))
    elif wrong == "norm of this layer":
        weights = weights._replace(input_norm=jnp.roll(weights.input_norm, 1, axis=0))
    elif wrong == "norms swapped":
        weights = weights._replace(input_norm=weights.post_norm, post_norm=weights.input_norm)
    got = reference.dense_layer(attended, x, weights, layer, eps=eps, offset=offset)
    assert max(errors(got, right)) > 2


SIZES = {"8b": (4096, 4096, 14336, 6144), "nemo": (5120, 4096, 14336, 6144), "70b": (8192, 8192, 28672, 10240)}


@pytest.mark.parametrize("name", SIZES)
def test_cuts_give_each_multiprocessor_a_share_in_wide_tiles(name):
    D, NH, F, QKV = SIZES[name]
    for gated, num_inputs, num_outputs in ((False, NH, D), (True, D, F), (False, F, D), (False, D, QKV)):
        found = cuts.cut(num_inputs, num_outputs, 132, gated=gated)
        total = num_inputs * num_outputs * (2 if gated else 1)
        assert total / 132 <= found.time(132) <= 1.1 * total / 132, found
        assert found.width >= 32, found
        assert found.units * found.width * 2 == num_outputs * found.splits * (2 if gated else 1)


def test_what_it_cannot_serve_it_says():
    _, _, weights = inputs(SHAPES[0])
    assert unsupported(weights, 8) is None
    assert "a multiple of 8 up to 16, got 12" in (unsupported(weights, 12) or "")
    assert "got 32" in (unsupported(weights, 32) or "")
    halves = DenseWeights(*(leaf.astype(jnp.float16) for leaf in weights))
    assert unsupported(halves, 8) == "all weights must be bfloat16, got float16 for input_norm"
    *_, odd = inputs((8, 576, 576, 1536, 960))
    assert "multiples of 128" in (unsupported(odd, 8) or "")
