"""What the architectures read from config.json and checkpoints, and what they refuse."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_golden import CASES, GOLDEN, build_params, load

from jaxserve.models import Model, Target, get_model
from jaxserve.models.base import ModelConfig
from jaxserve.sharding.mesh import abstract_mesh

V5_CONFIGS = json.loads((GOLDEN / "configs_v5.json").read_text())
GEMMA3_4B = {  # the published text_config, which leaves the rest to defaults
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}


def hub_config(case: str) -> dict:
    return json.loads(str(np.load(GOLDEN / f"{case}.npz")["config"]))


def config_of(case: str, **changes) -> ModelConfig:
    """The case's config.json with some fields changed; a field that is changed to ... is left out."""
    changed = hub_config(case) | changes
    return get_model({name: value for name, value in changed.items() if value is not ...}).config


def test_an_unknown_architecture_lists_the_known():
    with pytest.raises(
        ValueError, match=r"\['PhiForCausalLM'\] are not supported; .* Gemma2.*, LlamaForCausalLM, .*Qwen3Moe"
    ):
        get_model({"architectures": ["PhiForCausalLM"]})


def test_a_config_without_architecture_lists_the_known():
    with pytest.raises(ValueError, match=r"architectures \[\] are not supported; jaxserve knows .*Llama"):
        get_model({"hidden_size": 64})


@pytest.mark.parametrize("case", CASES)
def test_both_layouts_of_config_json_give_one_model(case):
    assert get_model(V5_CONFIGS[case]).config == get_model(hub_config(case)).config


@pytest.mark.parametrize("case", [case for case in CASES if case != "gemma3"])  # which has defaults for most
@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "num_attention_heads", "max_position_embeddings"])
def test_a_missing_field_is_named(case, field):
    with pytest.raises(ValueError, match=f"config.json lacks {field}$"):
        config_of(case, **{field: ...})


@pytest.mark.parametrize(
    ("case", "field"),
    [
        ("qwen3_moe", "num_experts"),
        ("qwen3_moe", "moe_intermediate_size"),
        ("gemma2", "head_dim"),
        ("gemma2", "sliding_window"),
        ("gemma3", "hidden_size"),
    ],
)
def test_a_missing_field_of_one_architecture_is_named(case, field):
    with pytest.raises(ValueError, match=f"config.json lacks {field}$"):
        config_of(case, **{field: ...})


@pytest.mark.parametrize(
    ("case", "field", "value"),
    [
        ("llama2", "hidden_act", "relu"),
        ("llama2", "attention_bias", True),
        ("llama2", "mlp_bias", True),
        ("llama2", "quantization_config", {"quant_method": "gptq"}),
        ("qwen3_moe", "decoder_sparse_step", 2),
        ("qwen3_moe", "mlp_only_layers", [0]),
        ("qwen3_moe", "use_sliding_window", True),
        ("gemma2", "hidden_activation", "gelu"),
        ("gemma2", "use_bidirectional_attention", True),
        ("gemma3", "attn_logit_softcapping", 50.0),
    ],
)
def test_an_unsupported_value_is_named(case, field, value):
    with pytest.raises(ValueError, match=rf"{field} .* is not supported; expected one of"):
        config_of(case, **{field: value})


@pytest.mark.parametrize("value", ["x", 1.5, 0, -1, 2**31, 10**20, True, float("nan"), [], {}])
@pytest.mark.parametrize(
    "field",
    ["hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "max_position_embeddings"],
)
def test_a_size_that_is_no_positive_integer_is_named(field, value):
    with pytest.raises(ValueError, match=rf"config.json: {field} must be an integer in \[\d, \d+\], got "):
        config_of("llama2", **{field: value})


@pytest.mark.parametrize("value", ["x", 0, -5, float("nan"), float("inf"), 10**400, True, []])
@pytest.mark.parametrize("field", ["rms_norm_eps", "rope_theta"])
def test_a_number_that_is_not_positive_and_finite_is_named(field, value):
    with pytest.raises(ValueError, match=rf"config.json: {field} must be a positive finite number, got "):
        config_of("llama2", **{field: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": None}, "rms_norm_eps must be a positive finite number, got None"),
        ({"max_position_embeddings": 1}, r"max_position_embeddings must be an integer in \[2, \d+\], got 1"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, got 'no'"),
        ({"hidden_act": []}, r"hidden_act \[\] is not supported"),
        ({"architectures": 5}, "architectures must be a list of strings, got 5"),
        ({"architectures": [["x"]]}, r"architectures must be a list of strings, got \[\['x'\]\]"),
        ({"rope_scaling": [1]}, r"rope_scaling must be an object, got \[1\]"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object, got 'linear'"),
        ({"rope_scaling": 5}, "rope_scaling must be an object, got 5"),
        ({"rope_scaling": {"type": "linear"}}, "rope scaling 'linear' lacks factor"),
        ({"rope_scaling": {"type": "linear", "factor": "x"}}, "rope_scaling.factor must be a positive finite"),
        ({"rope_scaling": {"type": "llama3", "factor": 8}}, "'llama3' lacks low_freq_factor, high_freq_factor"),
        ({"rope_parameters": {"rope_theta": -5}}, "rope_parameters.rope_theta must be a positive finite"),
        ({"head_dim": 15}, "head_dim must be even and positive .*, got 15"),
        ({"num_attention_heads": 128, "num_key_value_heads": 128, "head_dim": ...}, "head_dim must be even.*, got 0"),
        ({"head_dim": 2**30}, "fused matrices may have"),
        ({"intermediate_size": 2**31 - 1}, "fused matrices may have"),
    ],
)
def test_a_value_of_another_kind_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        config_of("llama2", **changes)


def test_nested_fields_are_checked_too():
    with pytest.raises(ValueError, match=r"config.json: text_config.hidden_size must be an integer in .*, got 'x'"):
        get_model({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"hidden_size": "x"}})
    with pytest.raises(ValueError, match=r"rope_parameters.sliding_attention must be an object, got 5"):
        config_of("gemma3", rope_parameters={"sliding_attention": 5})


def test_unsupported_rope_scaling_is_named():
    with pytest.raises(ValueError, match="rope scaling 'yarn' is not supported; expected default, linear or llama3"):
        config_of("qwen2", rope_scaling={"rope_type": "yarn", "factor": 4.0})
    with pytest.raises(ValueError, match="rope_type 'linear' is not supported"):
        config_of("gemma3", rope_parameters={"sliding_attention": {"rope_type": "linear", "factor": 2.0}})


def test_unsupported_layer_types_are_named():
    with pytest.raises(
        ValueError, match=r"layer_types \['chunked_attention'\] are not supported; expected \['full_att"
    ):
        config_of("qwen2", layer_types=["full_attention", "chunked_attention"])


@pytest.mark.parametrize("value", [5, "full_attention", [["full_attention"]]])
def test_layer_types_that_are_no_list_of_names_are_refused(value):
    with pytest.raises(ValueError, match=r"layer_types must be a list of strings, got "):
        config_of("qwen2", layer_types=value)


def test_sliding_layers_without_a_window_are_refused():
    with pytest.raises(ValueError, match="sliding layers need sliding_window"):
        config_of("qwen2", layer_types=["full_attention", "sliding_attention"])


def test_mistral_without_a_window_has_full_layers():
    assert config_of("mistral", sliding_window=None).layer_kinds == ("full", "full")


def test_qwen_ignores_the_window_that_it_does_not_use():
    config = config_of("qwen2_sliding", use_sliding_window=False)
    assert (config.layer_kinds, config.sliding_window) == (("full",) * 3, None)


def test_qwen_with_a_window_but_no_first_layer_begins_at_the_28th():
    config = config_of("qwen2_sliding", max_window_layers=None, layer_types=None, num_hidden_layers=30)
    assert config.layer_kinds == ("full",) * 28 + ("sliding",) * 2


def test_gemma3_with_vision_is_read_as_its_language_model():
    config = get_model({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": GEMMA3_4B}).config
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262_208)
    assert (config.layer_kinds.count("full"), config.layer_kinds[5], config.layer_kinds[33]) == (5, "full", "sliding")
    assert (config.rope_theta, config.rope_local_theta) == (1e6, 1e4)
    assert config.rope_scaling is not None
    assert config.rope_scaling.factor == 8.0


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_gemma3_with_vision_names_its_tensors_either_way(prefix):
    model = load("gemma3")[0]
    assert model.translate(f"{prefix}layers.3.self_attn.k_proj.weight") == Target(("layers", 3, "qkv"), "k")
    assert model.translate(f"{prefix}norm.weight") == Target(("final_norm",))
    assert model.translate("language_model.lm_head.weight") is None  # tied
    assert model.translate("vision_tower.vision_model.embeddings.position_embedding.weight") is None
    assert model.translate("model.multi_modal_projector.mm_soft_emb_norm.weight") is None


@pytest.mark.parametrize("case", CASES)
def test_an_unknown_tensor_is_a_key_error(case):
    model = load(case)[0]
    for name in (
        "model.layers.0.self_attn.q_proj.scale",
        "model.layers.0.mlp.experts.0.bias",
        "transformer.wte.weight",
    ):
        with pytest.raises(KeyError, match=name):
            model.translate(name)


@pytest.mark.parametrize("case", CASES)
def test_old_rotary_frequencies_are_ignored(case):
    assert load(case)[0].translate("model.layers.0.self_attn.rotary_emb.inv_freq") is None


def test_a_tied_output_layer_is_ignored_and_an_untied_one_is_not():
    assert load("llama3")[0].translate("lm_head.weight") is None
    assert load("llama2")[0].translate("lm_head.weight") == Target(("lm_head",))


def test_fused_parts_lie_in_order():
    model = load("llama2")[0]
    parts = [Target(("layers", 0, "qkv"), part).index(model.config)[0] for part in "qkv"]
    assert parts == [slice(0, 64), slice(64, 128), slice(128, 192)]
    experts = load("qwen3_moe")[0]
    target = experts.translate("model.layers.1.mlp.experts.5.up_proj.weight")
    assert target == Target(("layers", 1, "gate_up"), (5, "up"))
    assert target.index(experts.config) == (5, slice(32, 64))


@pytest.mark.parametrize("case", CASES)
def test_random_parameters_have_the_abstract_shapes(case):
    model: Model = load(case)[0]
    abstract = model.abstract_params(jnp.bfloat16)
    random = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.bfloat16))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), random) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), abstract
    )


@pytest.mark.parametrize("case", CASES)
def test_every_dimension_has_a_logical_axis(case):
    """`placements` refuses a leaf whose names are not as many as its dimensions."""
    model: Model = load(case)[0]
    abstract = model.abstract_params(jnp.bfloat16)
    places = model.placements(abstract_mesh(2, 2))
    assert jax.tree.structure(places) == jax.tree.structure(abstract)


def test_incomplete_weights_do_not_pass_as_a_model():
    """The helper of the parity tests would show a leaf, or a part of one, that no tensor fills."""
    model, params, _, _ = load("llama2")
    weights = {"model.embed_tokens.weight": np.asarray(params["embed"])}
    with pytest.raises(AssertionError):
        build_params(model, weights)
