"""Plain layers through the kernel that goes from attention to attention, interpreted, beside plain XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from steps import GEMMA, LLAMA, page_table, rows_and_cache, step

from jaxserve.layers import dense
from jaxserve.layers.decoder import stack_layers
from jaxserve.layers.kv_cache import init_kv_cache
from jaxserve.models import get_model
from jaxserve.pallas_kernels.dense_layer import mosaic_gpu as dense_mosaic_gpu
from jaxserve.pallas_kernels.paged_attention import mosaic_gpu

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 128,
    "head_dim": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
}
NUM_SEQS = 8

interpreted = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="before jax 0.12 the interpreter of Mosaic GPU kernels is not reliable"
)


@pytest.mark.full
@interpreted
def test_the_kernel_between_attentions_gives_what_xla_gives(monkeypatch):
    calls = []

    def interpreted(*args, **options):
        calls.append(args)
        return dense_layer(*args, **options, interpret=True)

    dense_layer = dense.dense_layer
    monkeypatch.setattr(dense, "dense_layer", interpreted)
    for module in (mosaic_gpu, dense_mosaic_gpu):
        monkeypatch.setattr(module, "num_multiprocessors", lambda: 2)
    monkeypatch.setattr("steps.PAGE_SIZE", 8)
    model = get_model(LLAMA | SIZES)
    params = model.init(jax.random.key(0), jnp.bfloat16)
    params = params | {"layers": stack_layers(params["layers"], model.layer_kinds)}
    kv = init_kv_cache(model.config, num_pages=80, page_size=8, dtype=jnp.bfloat16)
    kv = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), kv)
    table = page_table(NUM_SEQS)
    run = rows_and_cache(model, params)
    prompts = [list(range(3 + i, 6 + 2 * i)) for i in range(NUM_SEQS)]
    _, kv = run(kv, step([], [(0, prompt) for prompt in prompts], table), implementation="xla")
    assert not calls
    decodes = step([(i + 1, len(prompt)) for i, prompt in enumerate(prompts)], [], table)
    expected, expected_kv = run(kv, decodes, implementation="xla")
    with plgpu.force_gpu_interpret_mode():
        got, got_kv = run(kv, decodes, implementation="mosaic_gpu")
        nobody = jnp.zeros((0, SIZES["hidden_size"]), jnp.bfloat16)
        in_spans, _ = run(kv, decodes, span=(1, 2), frontier=nobody, implementation="mosaic_gpu")
    assert calls, "another way was taken"
    tolerance = {"rtol": 0.05, "atol": 0.05}  # a few roundings to bfloat16 a layer; the outputs are of size 1
    for each in (got, in_spans):
        np.testing.assert_allclose(np.asarray(each, np.float32), np.asarray(expected, np.float32), **tolerance)
    for kind in kv:
        for ours, theirs in ((got_kv[kind].k, expected_kv[kind].k), (got_kv[kind].v, expected_kv[kind].v)):
            np.testing.assert_allclose(np.asarray(ours, np.float32), np.asarray(theirs, np.float32), **tolerance)
    late, _ = run(kv, step([(i + 1, 2) for i in range(NUM_SEQS)], [], table), implementation="xla")
    assert not np.allclose(np.asarray(late, np.float32), np.asarray(expected, np.float32), **tolerance)


@pytest.mark.parametrize(
    ("hf", "plain"),
    [
        (LLAMA, True),
        (LLAMA | {"architectures": ["MistralForCausalLM"]}, True),
        (LLAMA | {"architectures": ["Qwen2ForCausalLM"]}, False),  # a bias before the rotation
        (LLAMA | {"architectures": ["Qwen3ForCausalLM"]}, False),  # a norm before the rotation
        (GEMMA, False),
    ],
    ids=lambda value: value["architectures"][0] if isinstance(value, dict) else "",
)
def test_which_models_have_plain_layers(hf, plain):
    assert (get_model(hf).plain_norm is not None) == plain


def test_a_shape_that_the_kernel_cannot_serve_is_said_once(caplog):
    stack = {name: jnp.zeros((2, *shape), jnp.bfloat16) for name, shape in _shapes(D=576).items()}
    assert dense.dense_weights(stack, 8) is None
    assert dense.dense_weights(stack, 16) is None
    assert len(caplog.records) == 1
    assert "multiples of 128" in caplog.text
    good = {name: jnp.zeros((2, *shape), jnp.bfloat16) for name, shape in _shapes(D=512).items()}
    assert dense.dense_weights(good, 16) is not None
    assert dense.dense_weights(good, 24) is None  # more rows than it is meant for: no word
    assert len(caplog.records) == 1


def _shapes(D: int) -> dict[str, tuple[int, ...]]:
    QKV, NH, F = 2 * D, D, 2 * D
    return {
        "input_norm": (D,),
        "qkv": (QKV, D),
        "o": (D, NH),
        "post_norm": (D,),
        "gate_up": (2 * F, D),
        "down": (D, F),
    }
