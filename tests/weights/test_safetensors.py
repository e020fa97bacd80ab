"""Hugging Face folders: whole ones in every shape, and incomplete or damaged ones."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from checkpoints import DTYPES, assert_same, expected_params, golden, write_hf

from jaxserve.exceptions import WeightsError
from jaxserve.layers.decoder import stack_layers
from jaxserve.models import get_model
from jaxserve.sharding.mesh import make_mesh
from jaxserve.weights import load
from jaxserve.weights.checkpoint import leaves_of
from jaxserve.weights.loader import abstract_params, open_checkpoint

CASES = ("llama2", "llama3", "qwen2", "qwen3_moe", "gemma2", "gemma3")


@pytest.fixture
def llama(tmp_path):
    return write_hf(tmp_path / "llama", *golden("llama2"))


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_finds_its_place(case, tmp_path):
    config, weights = golden(case)
    loaded = load(str(write_hf(tmp_path, config, weights)), dtype="float32")
    assert_same(loaded.params, expected_params(config, weights))


@pytest.mark.parametrize("dtype", DTYPES)
def test_auto_keeps_the_dtype_of_the_checkpoint(dtype, tmp_path):
    config, weights = golden("llama2")
    loaded = load(str(write_hf(tmp_path, config, weights, dtype=dtype)))
    assert_same(loaded.params, expected_params(config, weights, jnp.dtype(dtype)))


def test_another_dtype_is_converted_to(tmp_path):
    config, weights = golden("llama2")
    loaded = load(str(write_hf(tmp_path, config, weights, dtype="float16")), dtype="bfloat16")
    assert_same(loaded.params, expected_params(config, weights, jnp.bfloat16))


def test_many_files_are_one_model(tmp_path):
    config, weights = golden("qwen3")
    loaded = load(str(write_hf(tmp_path, config, weights, num_files=3)), dtype="float32")
    assert_same(loaded.params, expected_params(config, weights))


@pytest.mark.parametrize("case", ["llama2", "gemma2"])  # gemma2: two kinds of layers
def test_stacks_are_filled_as_if_stacked_afterwards(case, tmp_path):
    config, weights = golden(case)
    path = str(write_hf(tmp_path, config, weights))
    loaded = load(path, dtype="float32", stacked=True)
    expected = expected_params(config, weights)
    kinds = loaded.model.layer_kinds
    assert_same(loaded.params, expected | {"layers": jax.tree.map(np.asarray, stack_layers(expected["layers"], kinds))})


def test_quantised_leaves_are_stacked_too(tmp_path):
    path = str(write_hf(tmp_path, *golden("llama2")))
    layers = load(path, quantization="int8").params["layers"]
    stacks = load(path, quantization="int8", stacked=True).params["layers"]["full"]
    np.testing.assert_array_equal(stacks["qkv"].q[1], layers[1]["qkv"].q)
    np.testing.assert_array_equal(stacks["qkv"].scale[1], layers[1]["qkv"].scale)


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("stacked", [False, True])
def test_leaves_are_split_over_a_mesh(stacked, quantization, tmp_path):
    """Where the step programs expect them: else each step would move them."""
    config, weights = golden("llama2")
    mesh = make_mesh(2, 2)
    path = str(write_hf(tmp_path, config, weights))
    loaded = load(path, dtype="float32", stacked=stacked, quantization=quantization, mesh=mesh)
    specs = loaded.model.param_specs(loaded.params)
    is_in_place = jax.tree.map(
        lambda leaf, spec: leaf.sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), leaf.ndim),
        loaded.params,
        specs,
    )
    assert all(jax.tree.leaves(is_in_place))
    if quantization is None:
        down = loaded.params["layers"]["full"]["down"][1] if stacked else loaded.params["layers"][1]["down"]
        np.testing.assert_array_equal(down, expected_params(config, weights)["layers"][1]["down"])


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize(("stacked", "sizes"), [(False, (1, 1)), (False, (2, 2)), (True, (1, 2))])
def test_shapes_and_places_are_known_without_a_load(stacked, sizes, quantization, tmp_path):
    config, weights = golden("qwen3_moe")
    mesh, path = make_mesh(*sizes), str(write_hf(tmp_path, config, weights))
    loaded = load(path, dtype="float32", stacked=stacked, quantization=quantization, mesh=mesh)
    shapes = abstract_params(get_model(config), jnp.float32, mesh, quantization=quantization, stacked=stacked)

    def same(leaf, shape):
        placed = mesh is None or leaf.sharding.is_equivalent_to(shape.sharding, leaf.ndim)
        return placed and (leaf.shape, leaf.dtype) == (shape.shape, shape.dtype)

    assert all(jax.tree.leaves(jax.tree.map(same, loaded.params, shapes)))


def test_tokenizer_and_generation_config_come_along(llama):
    loaded = load(str(llama))
    assert loaded.generation_config == {"eos_token_id": [1, 2], "temperature": 0.6}
    assert loaded.tokenizer.encode("abc") == [2, 3, 4]
    assert (loaded.tokenizer.bos_token_id, loaded.tokenizer.eos_token_id) == (0, 1)


def test_the_tokenizer_may_come_from_elsewhere(llama, tmp_path):
    bare = write_hf(tmp_path / "bare", *golden("llama2"), tokenizer=False)
    assert load(str(bare), tokenizer=str(llama)).tokenizer.encode("abc") == [2, 3, 4]


def test_a_folder_without_tokenizer(tmp_path):
    path = write_hf(tmp_path, *golden("llama2"), tokenizer=False)
    with pytest.raises(WeightsError, match=r"has no tokenizer.json; save the fast tokenizer there, or pass tokenizer="):
        load(str(path))


def test_a_folder_without_config(llama):
    (llama / "config.json").unlink()
    with pytest.raises(WeightsError, match=r"has no config.json, so it is not a model folder"):
        load(str(llama))


def test_a_config_that_is_no_json(llama):
    (llama / "config.json").write_text('{"architectures": [')
    with pytest.raises(WeightsError, match=r"config.json is not valid JSON"):
        load(str(llama))
    (llama / "config.json").write_text("[]")
    with pytest.raises(WeightsError, match=r"config.json must hold a JSON object, got list"):
        load(str(llama))


@pytest.mark.parametrize("raw", [b"[" * 100_000, b'{"a":' * 5000, b"\xff\xfe\x00", b'{"a": ' + b"9" * 5000 + b"}"])
def test_json_that_cannot_be_decoded(raw, llama):
    (llama / "config.json").write_bytes(raw)
    with pytest.raises(WeightsError, match=r"config.json is not valid JSON"):
        load(str(llama))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "is not valid JSON"),
        (b"{", "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"[]", "must hold a JSON object, got list"),
        (b"null", "must hold a JSON object, got NoneType"),
        (b'{"bos_token": 5}', "bos_token must be a string or an object with content, got 5"),
        (b'{"eos_token": {"content": 5}}', "eos_token must be a string or an object with content, got {'content': 5}"),
        (b'{"chat_template": [5]}', r"chat_template must be a string or a list of objects .*, got \[5\]"),
        (b'{"chat_template": {"a": 1}}', "chat_template must be a string or a list of objects .*, got {'a': 1}"),
    ],
)
def test_a_damaged_tokenizer_config_is_named(raw, message, llama):
    (llama / "tokenizer_config.json").write_bytes(raw)
    with pytest.raises(WeightsError, match=rf"tokenizer_config.json:? {message}"):
        load(str(llama))


def test_the_default_of_several_chat_templates_is_used(llama):
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (llama / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load(str(llama)).tokenizer.chat_template == "yes"


def test_a_chat_template_that_is_no_text(llama):
    (llama / "chat_template.jinja").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WeightsError, match=r"chat_template.jinja is not text"):
        load(str(llama))


@pytest.mark.parametrize("weight_map", [[], None, "x"])
def test_an_index_without_a_map_is_refused(weight_map, llama):
    (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(WeightsError, match=r"index.json: weight_map must be an object, got "):
        load(str(llama))


@pytest.mark.parametrize("name", [5, ["x"], "", ".", "../other/model.safetensors", "/etc/passwd"])
def test_an_index_names_files_of_its_own_folder_only(name, llama):
    write_hf(llama.parent / "other", *golden("llama2"))
    (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(WeightsError, match=r"weight_map must give a file of the same folder for a, got "):
        load(str(llama))


def test_an_unknown_architecture_lists_the_known(tmp_path):
    config, weights = golden("llama2")
    path = write_hf(tmp_path, config | {"architectures": ["RwkvForCausalLM"]}, weights)
    with pytest.raises(ValueError, match=r"RwkvForCausalLM.* not supported; jaxserve knows .*LlamaForCausalLM"):
        load(str(path))


def test_missing_tensors_are_named(tmp_path):
    config, weights = golden("llama2")
    gone = ("model.layers.1.mlp.up_proj.weight", "lm_head.weight", "model.layers.0.input_layernorm.weight")
    path = write_hf(tmp_path, config, {name: w for name, w in weights.items() if name not in gone})
    with pytest.raises(WeightsError, match=r"missing tensors: ") as error:
        load(str(path))
    assert "model.layers.1.mlp.up_proj.weight" in str(error.value)
    assert "model.layers.0.input_layernorm.weight" in str(error.value)
    assert "lm_head" in str(error.value)
    assert "down_proj" not in str(error.value)


def test_a_missing_expert_is_named(tmp_path):
    config, weights = golden("qwen3_moe")
    gone = "model.layers.1.mlp.experts.3.gate_proj.weight"
    path = write_hf(tmp_path, config, {name: w for name, w in weights.items() if name != gone})
    with pytest.raises(WeightsError, match=rf"missing tensors: {gone};"):
        load(str(path))


def test_extra_tensors_are_named(tmp_path):
    config, weights = golden("llama2")
    path = write_hf(
        tmp_path, config, weights | {"model.layers.2.mlp.up_proj.weight": np.ones((96, 64)), "vision.x": np.ones(3)}
    )
    with pytest.raises(
        WeightsError, match=r"LlamaForCausalLM does not have: .*model.layers.2.mlp.up_proj.weight, vision"
    ):
        load(str(path))


def test_misshapen_tensors_are_named(tmp_path):
    config, weights = golden("llama2")
    name = "model.layers.0.self_attn.v_proj.weight"
    path = write_hf(tmp_path, config, weights | {name: weights[name].T[:, :-1]})
    with pytest.raises(WeightsError, match=rf"{name} must have shape \(64, 64\), got \(64, 63\)"):
        load(str(path))


@pytest.mark.parametrize("cut", [5, 1000, -1])
def test_a_truncated_file_is_detected(cut, llama):
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(WeightsError, match=r"model.safetensors is damaged or truncated"):
        load(str(llama))


def test_an_absent_file_of_the_index_is_named(tmp_path):
    path = write_hf(tmp_path, *golden("llama2"), num_files=2)
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"are absent: model-00002-of-00002.safetensors; download"):
        load(str(path))


def test_pickled_weights_are_refused(llama):
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"pickled weights \(pytorch_model.bin\).*safetensors"):
        load(str(llama))


def test_a_folder_without_weights(llama):
    (llama / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"has a config.json but no model.safetensors"):
        load(str(llama))


def test_quantised_tensors_are_refused(tmp_path):
    config, weights = golden("llama2")
    path = write_hf(tmp_path, config, weights)
    tensors = weights | {"model.norm.weight": np.ones(64, np.int8)}
    safetensors.numpy.save_file(tensors, path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"tensor model.norm.weight is I8; jaxserve reads"):
        load(str(path))


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "nowhere.gguf", "a/b/c", "nowhere"])
def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(name):
    with pytest.raises(WeightsError, match=r"does not exist; expected a file, a folder, an id like org/model"):
        load(name)


def test_an_unknown_quantization_is_refused(llama):
    with pytest.raises(NotImplementedError, match="quantization must be 'int8' or None, got 'int3'"):
        load(str(llama), quantization="int3")


def test_the_host_holds_one_leaf_at_a_time(tmp_path):
    """Besides the arrays handed out: each leaf's buffer is the array's own memory (CPU) or gone when the next comes."""
    config, weights = golden("llama2")
    checkpoint = open_checkpoint(str(write_hf(tmp_path, config, weights)))
    live: list[int] = []
    read_into = checkpoint.read_into

    def counting(name, out):
        live.append(out.nbytes)
        read_into(name, out)

    checkpoint.read_into = counting
    model = load(str(tmp_path), dtype="float32").model
    places = leaves_of(model.placements(None))
    for path, _ in checkpoint.leaves(model, "float32", places):
        # All parts of this leaf were read, and nothing of another.
        assert len(live) == {"qkv": 3, "gate_up": 2}.get(path[-1], 1)
        live.clear()


def test_config_dtype_has_two_spellings(llama):
    config = json.loads((llama / "config.json").read_text())
    del config["dtype"]
    (llama / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    assert load(str(llama)).params["embed"].dtype == jnp.bfloat16
