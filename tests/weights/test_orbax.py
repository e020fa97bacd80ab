"""Converted checkpoints come back the same, in their final sharding, and damaged ones are refused."""

import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from checkpoints import assert_same, expected_params, golden, write_gguf, write_hf

from jaxserve.exceptions import WeightsError
from jaxserve.layers.decoder import stack_layers
from jaxserve.sharding.mesh import make_mesh
from jaxserve.weights import convert, load


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("orbax")
    config, weights = golden("llama2")
    return convert(str(write_hf(folder / "source", config, weights)), folder / "converted")


@pytest.fixture
def copy(converted, tmp_path):
    return shutil.copytree(converted, tmp_path / "copy")


@pytest.mark.parametrize("case", ["qwen2", "qwen3_moe", "gemma2"])
def test_a_converted_model_loads_as_its_source(case, tmp_path):
    config, weights = golden(case)
    source = write_hf(tmp_path / "source", config, weights)
    target = convert(str(source), tmp_path / "target")
    assert_same(load(str(target)).params, expected_params(config, weights))


def test_config_tokenizer_and_generation_config_come_along(converted):
    loaded = load(str(converted))
    source = load(str(converted.parent / "source"))
    assert loaded.model.config == source.model.config
    assert loaded.generation_config == source.generation_config
    assert loaded.tokenizer.encode("abc") == source.tokenizer.encode("abc")
    assert loaded.tokenizer.named_tokens == source.tokenizer.named_tokens


def test_gguf_is_converted_with_its_tokenizer_and_template(tmp_path):
    config, weights = golden("llama2")
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    source = write_gguf(tmp_path / "model.gguf", config, weights, metadata={"tokenizer.chat_template": template})
    loaded = load(str(convert(str(source), tmp_path / "target")), dtype="float32")
    assert_same(loaded.params, expected_params(config, weights))
    assert loaded.tokenizer.encode("三") == load(str(source)).tokenizer.encode("三")
    assert loaded.tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "<s>x"


def test_the_dtype_can_change_on_either_side(converted, tmp_path):
    config, weights = golden("llama2")
    narrow = expected_params(config, weights, jax.numpy.bfloat16)
    assert_same(load(str(converted), dtype="bfloat16").params, narrow)
    assert_same(
        load(str(convert(str(converted), tmp_path / "again", dtype="bfloat16")), dtype="bfloat16").params, narrow
    )


def test_stacks(converted):
    expected = expected_params(*golden("llama2"))
    stacks = jax.tree.map(np.asarray, stack_layers(expected["layers"], ("full", "full")))
    assert_same(load(str(converted), stacked=True).params, expected | {"layers": stacks})


def test_leaves_are_restored_into_their_places_on_a_mesh(converted, tmp_path):
    """As from the checkpoint that was converted: those of rows in order straight, others through the host."""
    mesh = make_mesh(2, 2)
    direct = load(str(write_hf(tmp_path / "hf", *golden("llama2"))), dtype="float32", mesh=mesh).params
    restored = load(str(converted), mesh=mesh).params
    assert_same(restored, jax.tree.map(np.asarray, direct))
    assert jax.tree.map(lambda leaf: leaf.sharding, restored) == jax.tree.map(lambda leaf: leaf.sharding, direct)


def test_an_existing_folder_is_not_overwritten(converted):
    with pytest.raises(WeightsError, match="exists; convert into a new folder"):
        convert(str(converted), converted)


def test_a_missing_layer_is_named(copy):
    shutil.rmtree(copy / "params" / "layer_1")
    with pytest.raises(WeightsError, match=r"missing tensors: layer_1\.\w+, layer_1"):
        load(str(copy))


def test_a_model_of_another_shape(copy):
    config = (copy / "config.json").read_text().replace('"vocab_size": 128', '"vocab_size": 130')
    (copy / "config.json").write_text(config)
    with pytest.raises(WeightsError, match=r"outer.embed must have shape \(130, 64\), got \(128, 64\)"):
        load(str(copy))


def test_an_extra_tensor_is_named(copy):
    config = (copy / "config.json").read_text()
    (copy / "config.json").write_text(config.replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    with pytest.raises(WeightsError, match=r"tensors that the model does not have: outer.lm_head"):
        load(str(copy))


def test_truncated_data_is_detected(copy):
    for file in (copy / "params" / "layer_0").rglob("*"):
        if file.is_file() and file.stat().st_size > 2000:
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(WeightsError, match=r"layer_0 is damaged or truncated"):
        load(str(copy))


_CONVERT = """
import sys, threading, time
import jax, orbax.checkpoint
from jaxserve.weights import convert

def anonymous_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

jax.numpy.zeros(8).block_until_ready()
base, peak = anonymous_bytes(), 0
def watch():
    global peak
    while True:
        peak = max(peak, anonymous_bytes())
        time.sleep(0.005)
threading.Thread(target=watch, daemon=True).start()
convert("smollm2-135m", sys.argv[1], dtype="float32")
print(peak - base)
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_conversion_holds_much_less_than_the_model(tmp_path):
    """The demo model takes 538 MB in float32, 113 MB of them the embedding, of which Orbax makes copies."""
    run = subprocess.run(
        [sys.executable, "-c", _CONVERT, str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    assert int(run.stdout) < 400e6
