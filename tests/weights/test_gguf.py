"""GGUF files against the tensors they were made from, and damaged ones."""

import struct

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import GGUF_CASES, assert_same, expected_params, golden, write_gguf

from jaxserve.exceptions import WeightsError
from jaxserve.models import get_model
from jaxserve.weights import load
from jaxserve.weights.gguf import GGUFCheckpoint
from jaxserve.weights.gguf_file import READABLE_TYPES, GGUFFile, dequantize_into

Q = gguf.GGMLQuantizationType


@pytest.fixture
def llama(tmp_path):
    config, weights = golden("llama2")
    return write_gguf(tmp_path / "llama.gguf", config, weights)


@pytest.mark.parametrize("case", GGUF_CASES)
def test_every_architecture_comes_back_as_it_was_converted(case, tmp_path):
    config, weights = golden(case)
    config = config | GGUF_CASES[case]
    path = write_gguf(tmp_path / "model.gguf", config, weights)
    loaded = load(str(path), dtype="float32")
    assert_same(loaded.params, expected_params(config, weights))
    assert loaded.model.config == get_model(config).config


@pytest.mark.parametrize("case", ["llama2", "gemma2"])
def test_layouts_that_llama_cpp_changes_would_be_noticed(case, tmp_path):
    """Reading q rows or norms as they lie in the file gives other parameters."""
    config, weights = golden(case)
    path = write_gguf(tmp_path / "model.gguf", config | GGUF_CASES[case], weights)
    name, ours = {
        "llama2": ("blk.0.attn_q.weight", "self_attn.q_proj"),
        "gemma2": ("blk.0.attn_norm.weight", "input_layernorm"),
    }[case]
    stored = GGUFFile(path).rows(name).view(np.float32)
    assert not np.array_equal(stored, weights[f"model.layers.0.{ours}.weight"])


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_types_of_a_whole_model(name, tmp_path):
    config, weights = golden("llama2")
    plain = {n: gguf.dequantize(gguf.quantize(w, Q[name]), Q[name]) if w.ndim > 1 else w for n, w in weights.items()}
    path = write_gguf(tmp_path / "model.gguf", config, weights, type_=Q[name])
    assert_same(load(str(path), dtype="float32").params, expected_params(config, plain))


@pytest.mark.parametrize("name", READABLE_TYPES)
def test_rows_are_dequantised_alike_in_pieces_and_at_once(name):
    block, size = gguf.GGML_QUANT_SIZES[Q[name]]
    rng = np.random.default_rng(0)
    num_rows, num_cols = 40, 256 * 256  # more than one piece
    encoded = rng.integers(0, 60, (num_rows, num_cols // block * size), np.uint8)  # small bytes: finite scales
    out = np.empty((num_rows, num_cols), np.float32)
    dequantize_into(encoded, name, out)
    np.testing.assert_array_equal(out, gguf.dequantize(encoded, Q[name]))
    assert np.isfinite(out).all()
    assert len(np.unique(out)) > 10


def test_bfloat16_is_rounded_from_the_dequantised_value(tmp_path):
    config, weights = golden("llama2")
    path = write_gguf(tmp_path / "model.gguf", config, weights, type_=Q.Q8_0)
    loaded = load(str(path), dtype="bfloat16").params["embed"]
    exact = gguf.dequantize(gguf.quantize(weights["model.embed_tokens.weight"], Q.Q8_0), Q.Q8_0)
    np.testing.assert_array_equal(np.asarray(loaded), exact.astype(jnp.bfloat16))


def test_linear_rope_scaling(tmp_path):
    config, weights = golden("llama2")
    config = config | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    path = write_gguf(tmp_path / "model.gguf", config, weights)
    assert get_model(GGUFCheckpoint(path).config).config == get_model(config).config


def test_eos_ids_are_those_of_sequence_turn_and_message(tmp_path):
    config, weights = golden("llama2")
    ends = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 2}
    path = write_gguf(tmp_path / "model.gguf", config, weights, metadata=ends)
    assert GGUFCheckpoint(path).generation_config == {"eos_token_id": [2, 7], "bos_token_id": 1}


def test_other_rope_factors_are_refused(tmp_path):
    config, weights = golden("llama3")
    scaling = GGUF_CASES["llama3"]["rope_scaling"] | {"high_freq_factor": 16.0}
    path = write_gguf(tmp_path / "model.gguf", config | {"rope_scaling": scaling}, weights)
    with pytest.raises(WeightsError, match=r"rope_freqs.weight does not hold Llama 3.1's factors"):
        GGUFCheckpoint(path)


def test_a_file_that_is_no_gguf(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(WeightsError, match="starts with b'GGUF', this one with"):
        load(str(path))


def test_an_empty_file(tmp_path):
    path = tmp_path / "model.gguf"
    path.touch()
    with pytest.raises(WeightsError, match="starts with b'GGUF'"):
        load(str(path))


def test_every_truncation_is_detected(llama):
    whole = llama.read_bytes()
    header_end = min(t.offset for t in GGUFFile(llama).tensors.values())
    for length in [4, 8, 20, 24, 100, header_end // 2, header_end - 33, header_end, len(whole) // 2, len(whole) - 1]:
        llama.write_bytes(whole[:length])
        with pytest.raises(WeightsError, match="truncated"):
            GGUFCheckpoint(llama)


def test_a_damaged_length_is_detected(llama):
    data = bytearray(llama.read_bytes())
    data[24:32] = struct.pack("<Q", 1 << 40)  # length of the first key
    llama.write_bytes(data)
    with pytest.raises(WeightsError, match="damaged or truncated GGUF header"):
        GGUFCheckpoint(llama)


def test_another_version(llama):
    data = bytearray(llama.read_bytes())
    data[4:8] = struct.pack("<I", 9)
    llama.write_bytes(data)
    with pytest.raises(WeightsError, match="version must be 2 or 3, got 9"):
        GGUFCheckpoint(llama)


def test_a_tensor_type_that_cannot_be_read(tmp_path):
    config, weights = golden("llama2")
    path = write_gguf(tmp_path / "model.gguf", config, weights, type_=Q.Q5_0)
    with pytest.raises(WeightsError, match=r"unsupported type Q5_0; those that can be read are F32, F16"):
        GGUFCheckpoint(path)


def test_an_unknown_architecture_lists_the_known(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.add_tensor("x", np.zeros(4, np.float32))
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    with pytest.raises(WeightsError, match="'mamba' is not supported; known are llama, qwen2, qwen3"):
        GGUFCheckpoint(tmp_path / "model.gguf")


def test_one_part_of_a_split_file(tmp_path):
    config, weights = golden("llama2")
    path = write_gguf(tmp_path / "model.gguf", config, weights, metadata={"split.count": 3})
    with pytest.raises(WeightsError, match="one of 3 parts; join them"):
        GGUFCheckpoint(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.attention.head_count", 0),
        ("llama.attention.head_count", "x"),
        ("llama.embedding_length", 0),
        ("llama.embedding_length", -4),
        ("llama.embedding_length", "x"),
        ("llama.embedding_length", 2.5),
        ("llama.feed_forward_length", 0),
        ("llama.context_length", "x"),
        ("llama.block_count", 1 << 24),
        ("llama.block_count", "x"),
        ("llama.rope.freq_base", -1.0),
        ("llama.attention.layer_norm_rms_epsilon", float("nan")),
        ("general.alignment", 0),
        ("general.alignment", "x"),
        ("general.alignment", [1]),
        ("general.architecture", [1]),
        ("general.name", 7),
        ("general.file_type", [1]),
        ("split.count", "x"),
        ("tokenizer.ggml.model", [1]),
        ("tokenizer.ggml.tokens", 1),
        ("tokenizer.ggml.tokens", [1, 2]),
        ("tokenizer.ggml.scores", [1.0]),
        ("tokenizer.ggml.token_type", 1),
        ("tokenizer.ggml.unknown_token_id", 9999),
        ("tokenizer.ggml.eos_token_id", [1]),
        ("tokenizer.ggml.add_bos_token", "x"),
        ("tokenizer.chat_template", 1),
    ],
)
def test_metadata_of_another_kind_is_named(key, value, llama):
    _append_metadata(llama, (key, value))
    with pytest.raises(WeightsError, match=rf"{key} (must|is)"):
        load(str(llama))


@pytest.mark.parametrize("merges", [1, ["zz"], ["qqq zzz"], ["a b c"]])
def test_merges_that_do_not_fit_are_refused(merges, llama):
    _append_metadata(llama, ("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.merges", merges))
    with pytest.raises(WeightsError, match=r"tokenizer.ggml.merges (must be a list of strings|do not fit)"):
        load(str(llama))


def test_arrays_nested_deep_are_refused(llama):
    nested = struct.pack("<IQ", 9, 1) * 20_000 + struct.pack("<IQI", 4, 1, 1)
    _insert_metadata(llama, struct.pack("<Q6sI", 6, b"x.deep", 9) + nested)
    with pytest.raises(WeightsError, match=r"damaged .* header \(x.deep: arrays nested more than 8 deep\)"):
        GGUFCheckpoint(llama)


def test_metadata_may_be_given_again(llama):
    """The helper of the tests above leaves a file that loads."""
    _append_metadata(llama, ("general.name", "again"), ("general.alignment", 32))
    assert load(str(llama)).name == "again"


def test_missing_tensors_are_named(tmp_path):
    config, weights = golden("llama2")
    weights = {name: w for name, w in weights.items() if name != "model.layers.1.self_attn.k_proj.weight"}
    path = write_gguf(tmp_path / "model.gguf", config, weights)
    with pytest.raises(WeightsError, match=r"missing tensors: model.layers.1.self_attn.k_proj.weight; the checkpoint"):
        load(str(path))


def test_extra_tensors_are_named(tmp_path):
    config, weights = golden("llama2")
    path = write_gguf(tmp_path / "model.gguf", config | {"model_type": "qwen3"}, _with_norms(weights))
    checkpoint = GGUFCheckpoint(path)
    checkpoint.config["architectures"] = ["LlamaForCausalLM"]
    model = get_model(checkpoint.config)
    with pytest.raises(WeightsError, match=r"LlamaForCausalLM does not have: model.layers.0.self_attn.q_norm.weight"):
        next(checkpoint.leaves(model, "float32", {}))


def _with_norms(weights):
    norms = {f"model.layers.0.self_attn.{x}_norm.weight": np.ones(16, np.float32) for x in "qk"}
    return weights | norms


def _append_metadata(path, *pairs):
    """Gives keys a value of any kind; one that the file has already is overruled."""
    _insert_metadata(path, *(_text(key) + struct.pack("<I", _kind(value)) + _value(value) for key, value in pairs))


def _insert_metadata(path, *pairs):
    """Encoded pairs go before the tensor table; the data is padded so that it stays aligned."""
    data = bytearray(path.read_bytes())
    tensors = GGUFFile(path).tensors
    first = _text(next(iter(tensors)))
    table, start = data.index(first), min(tensor.offset for tensor in tensors.values())
    end = data.rindex(struct.pack("<Q", max(t.offset for t in tensors.values()) - start), table, start) + 8
    header = bytes(data[:table]) + b"".join(pairs) + bytes(data[table:end])
    data = bytearray(header + bytes(-len(header) % 32) + data[start:])
    struct.pack_into("<Q", data, 16, struct.unpack_from("<Q", data, 16)[0] + len(pairs))
    path.write_bytes(data)


def _kind(value):
    return {bool: 7, int: 5, float: 6, str: 8, list: 9}[type(value)]


def _text(text):
    return struct.pack("<Q", len(text)) + text.encode()


def _value(value):
    if isinstance(value, list):
        return struct.pack("<IQ", _kind(value[0]), len(value)) + b"".join(map(_value, value))
    return _text(value) if isinstance(value, str) else struct.pack("<f" if isinstance(value, float) else "<i", value)
