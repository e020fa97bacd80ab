import jax
import jax.numpy as jnp
import numpy as np
import pytest
from steps import LLAMA, make, page_table, step

from jaxserve.layers.contract import contract, outputs_first
from jaxserve.layers.decoder import forward, stack_layers
from jaxserve.layers.linear import linear
from jaxserve.layers.moe import moe
from jaxserve.layers.quantized import Int8Weight, int8_linear, quantize_int8, quantize_rows
from jaxserve.weights.quantize import quantized

ROWS, IN, OUT = 5, 96, 40


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def weight(seed: int, *shape: int) -> np.ndarray:
    """Rows of very different size, as trained weights have."""
    return normal(seed, *shape) * np.exp(normal(seed + 1, *shape[:-1], 1))


def dequantized(w: Int8Weight) -> np.ndarray:
    return np.asarray(w.q, np.float64) * np.asarray(w.scale, np.float64)[..., None]


def relative_error(got, want) -> float:
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))


def test_a_row_is_rounded_by_at_most_half_its_scale():
    x = weight(0, ROWS, IN)
    q, scale = quantize_rows(jnp.asarray(x))
    error = np.abs(np.asarray(q) * np.asarray(scale)[:, None] - x)
    assert np.all(error <= np.asarray(scale)[:, None] * 0.5001)
    assert np.array_equal(np.abs(np.asarray(q)).max(axis=1), np.full(ROWS, 127))


def test_a_row_of_zeros_stays_zero():
    x = jnp.zeros((2, IN)).at[1].set(1.0)
    assert np.array_equal(int8_linear(x, quantize_int8(jnp.zeros((OUT, IN)))), np.zeros((2, OUT)))
    y = np.asarray(int8_linear(x, quantize_int8(jnp.asarray(weight(1, OUT, IN)))))
    assert np.all(y[0] == 0)
    assert np.all(np.isfinite(y[1]))


@pytest.mark.parametrize("rows", [1, 2, 32, 33])
def test_the_product_is_exact_for_the_rounded_operands(rows):
    x, w = normal(2, rows, IN), quantize_int8(jnp.asarray(weight(3, OUT, IN)))
    q, scale = quantize_rows(jnp.asarray(x))
    want = (np.asarray(q, np.float64) * np.asarray(scale, np.float64)[:, None]) @ dequantized(w).T
    assert relative_error(int8_linear(jnp.asarray(x), w), want) < 1e-6


def test_the_product_is_close_to_float32_and_wrong_scales_are_not():
    x, w = jnp.asarray(normal(4, ROWS, IN)), jnp.asarray(weight(5, OUT, IN))
    want, good = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T, quantize_int8(w)
    bound = (
        0.02  # two roundings of 1/127 of a row's maximum, which is about 3 standard deviations: 2 * 3 / 127 / 12**.5
    )
    assert relative_error(int8_linear(x, good), want) < bound
    wrong = {
        "zeros": jnp.zeros((ROWS, OUT)),
        "one scale for all outputs": int8_linear(x, Int8Weight(q=good.q, scale=jnp.full(OUT, good.scale.mean()))),
        "the neighbour's scale": int8_linear(x, Int8Weight(q=good.q, scale=jnp.roll(good.scale, 1))),
        "scales 3 % too large": int8_linear(x, Int8Weight(q=good.q, scale=good.scale * 1.03)),
        "without the activations' scale": int8_linear(x, good) / quantize_rows(x)[1][:, None],
    }
    for name, y in wrong.items():
        assert relative_error(y, want) > bound, name


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 64, 65])
def test_both_forms_of_a_product_agree(rows, dtype):
    x, w = jnp.asarray(normal(6, rows, 1024), dtype), jnp.asarray(weight(7, OUT, 1024), dtype)
    assert outputs_first(rows, *w.shape, w.dtype.itemsize) == (rows <= 64)
    want = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    got = contract(x, w, jnp.float32)
    assert got.shape == (rows, OUT)
    assert relative_error(got, want) < 1e-6
    assert relative_error(jnp.roll(got, 1, axis=1), want) > 0.1


def test_linear_takes_a_quantised_weight_with_bias_and_output_type():
    x, w = jnp.asarray(normal(8, ROWS, IN), jnp.bfloat16), quantize_int8(jnp.asarray(weight(9, OUT, IN)))
    bias = jnp.asarray(normal(10, OUT), jnp.bfloat16)
    want = np.asarray(int8_linear(x, w)) + np.asarray(bias, np.float32)
    assert linear(x, w, bias).dtype == jnp.bfloat16
    np.testing.assert_array_equal(linear(x, w, bias, out_dtype=jnp.float32), want)


@pytest.mark.parametrize("rows", [2, 16, 512])
def test_the_weight_is_never_widened_or_copied(rows):
    """An array of the weight's shape in another type or place costs more than the product itself."""
    x = jax.ShapeDtypeStruct((rows, 1536), jnp.bfloat16)
    w = Int8Weight(q=jax.ShapeDtypeStruct((3072, 1536), jnp.int8), scale=jax.ShapeDtypeStruct((3072,), jnp.float32))
    compiled = jax.jit(linear).lower(x, w).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < rows * (3072 * 12 + 1536 * 8)
    made = [line for line in compiled.as_text().splitlines() if "[3072,1536]" in line.split(" = ")[-1].split("(")[0]]
    assert all("parameter(" in line for line in made), made


def test_quantised_experts_stay_close_to_float32():
    experts, d, f = 4, 32, 48
    x, router = jnp.asarray(normal(11, 6, d)), jnp.asarray(normal(12, experts, d))
    gate_up, down = jnp.asarray(normal(13, experts, 2 * f, d)), jnp.asarray(normal(14, experts, d, f))

    def run(gate_up, down):
        return moe(x, router, gate_up, down, top_k=2, normalize=True, act="silu")[0]

    want = np.asarray(run(gate_up, down), np.float64)
    assert relative_error(run(quantize_int8(gate_up), quantize_int8(down)), want) < 0.05
    wrong = quantize_int8(down)
    assert relative_error(run(gate_up, Int8Weight(q=wrong.q, scale=jnp.roll(wrong.scale, 1, axis=1))), want) > 0.05


def test_only_the_weights_of_matmuls_are_quantised():
    leaves = [(("embed",), jnp.ones((8, 4))), (("final_norm",), jnp.ones(4))]
    leaves += [(("layers", 0, name), jnp.ones((8, 4))) for name in ("qkv", "o", "gate_up", "down", "router")]
    found = dict(quantized(leaves, "int8", tied=True))
    kinds = {path[-1]: isinstance(leaf, Int8Weight) for path, leaf in found.items()}
    assert kinds == {
        "embed": False, "final_norm": False, "router": False,
        "lm_head": True, "qkv": True, "o": True, "gate_up": True, "down": True,
    }  # fmt: skip
    assert "lm_head" not in {path[-1] for path, _ in quantized(leaves, "int8", tied=False)}


@pytest.mark.parametrize("stacked", [False, True])
def test_a_quantised_model_predicts_almost_the_same(stacked):
    model, params, kv = make(LLAMA | {"tie_word_embeddings": True})
    layers = [{name: leaf for (*_, name), leaf in quantized(_leaves(p), "int8", tied=True)} for p in params["layers"]]
    outer = {path[-1]: leaf for path, leaf in quantized([(("embed",), params["embed"])], "int8", tied=True)}
    rounded = params | outer | {"layers": stack_layers(layers, model.layer_kinds) if stacked else tuple(layers)}
    batch = step([], [(0, [3, 14, 15, 9, 26, 5])], page_table(1))

    def logprobs(params):
        return jax.nn.log_softmax(model.logits(params, forward(model, params, kv, batch)[0]))

    want = logprobs(params)
    divergence = lambda got: float(jnp.mean(jnp.sum(jnp.exp(want) * (want - got), axis=-1)))  # noqa: E731
    assert 0 < divergence(logprobs(rounded)) < 1e-3
    off_by_one = rounded | {"lm_head": jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), rounded["lm_head"])}
    assert divergence(logprobs(off_by_one)) > 1e-3


def _leaves(layer: dict) -> list:
    return [(("layers", 0, name), leaf) for name, leaf in layer.items()]


def test_an_unknown_quantisation_is_refused():
    with pytest.raises(NotImplementedError, match="quantization must be 'int8' or None, got 'int3'"):
        list(quantized([], "int3", tied=False))
