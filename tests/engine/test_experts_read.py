"""The bytes of experts' weights that steps read, of a mixture in which a token picks one expert or all."""

import json

import pytest

from jaxserve import LLM, SamplingParams

LAYERS, EXPERTS, D, F = 3, 4, 32, 16
EXPERT_BYTES = 3 * D * F * 4  # float32


@pytest.fixture
def engine(tmp_path):
    def start(top_k: int, num_experts: int = EXPERTS, **options):
        config = {
            "architectures": ["Qwen3MoeForCausalLM"],
            "vocab_size": 64,
            "hidden_size": D,
            "intermediate_size": F,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e4,
            "num_experts": num_experts,
            "num_experts_per_tok": top_k,
            "moe_intermediate_size": F,
            "tie_word_embeddings": True,
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        options = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "warm_up": "off", **options}
        return LLM(str(tmp_path), load_format="dummy", dtype="float32", **options)

    return start


def answer(llm, prompts):
    params = SamplingParams(max_tokens=6, ignore_eos=True, detokenize=False)
    llm.generate(prompts, params, use_tqdm=False)
    return [step.expert_bytes for step in llm.recent_steps()]


def test_a_lone_token_reads_one_expert_a_layer_and_padding_none(engine):
    with engine(top_k=1) as llm:
        counted = answer(llm, [[7]])
        assert len(counted) >= 6
        assert counted == [LAYERS * EXPERT_BYTES] * len(counted)
        assert llm.get_metrics()["jaxserve:expert_bytes"] == sum(counted)


@pytest.mark.parametrize(
    ("num_experts", "kv", "tp"), [pytest.param(6, 1, 4, marks=pytest.mark.full), (4, 2, 1)], ids=str
)
def test_experts_of_all_ranks_are_counted_and_padding_is_not(engine, num_experts, kv, tp):
    """6 experts on 4 ranks, two on each: the last rank has none, and nothing of the padding is read."""
    sizes = {"tensor_parallel_size": tp, "kv_parallel_size": kv}
    with engine(top_k=num_experts, num_experts=num_experts, **sizes) as llm:
        counted = answer(llm, [[7, 8]])
        assert counted == [LAYERS * num_experts * EXPERT_BYTES] * len(counted)


def test_layered_prefill_reads_each_group_once_beside_the_decodes(engine):
    """All tokens pick all experts, so that a step reads those of the layers that some row passes."""
    with engine(top_k=EXPERTS, prefill="layered") as llm:
        counted = answer(llm, [list(range(20)), [3, 4]])
        passed = [LAYERS if step.num_decode_rows else step.layer_hi - step.layer_lo for step in llm.recent_steps()]
        assert counted == [layers * EXPERTS * EXPERT_BYTES for layers in passed]
