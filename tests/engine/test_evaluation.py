"""What `jaxserve eval` finds is what the engine would do."""

import json
import re
import shlex
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import LLM, EngineDeadError, SamplingParams, cli, weights
from jaxserve.cli.evaluate import defaults
from jaxserve.evaluation import compare as compare_module
from jaxserve.evaluation.needles import make_needle
from jaxserve.evaluation.watch import watch
from jaxserve.layers.sparse import H2O, LServe, Quest, SparseAttention, StreamingLLM, resolve

POLICY = SparseAttention(decode=LServe(budget=24, parts=2, reselect=3, layers=(1, None)))
PROMPT = np.random.default_rng(3).integers(3, 300, 70).tolist()
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def loaded(tiny_model):
    return weights.load(tiny_model, dtype=jnp.float32, progress=False)


def test_a_pass_over_a_text_says_what_decoding_says(tiny_model, loaded):
    options = {"dtype": "float32", "max_model_len": 96, "page_size": 8, "num_pages": 26, "max_num_seqs": 2}
    llm = LLM(tiny_model, sparse_attention=POLICY, warm_up="off", **options)
    answer = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    llm.close()
    found = watch(loaded, POLICY, PROMPT + answer, len(PROMPT), page_size=8)
    assert found.says(answer)
    dense = watch(loaded, None, PROMPT + answer, len(PROMPT), page_size=8)
    assert not dense.says(answer)
    assert found.kl_from(dense) > 1e-3
    assert (dense.kl_from(dense), dense.recall, dense.density) == (0.0, 1.0, 1.0)
    assert found.density < found.recall < 1


def test_recall_and_density_are_those_of_what_is_read(loaded):
    """Of 80 positions, the last of which is an answer of one token, a window of 24 has the last three pages of 8."""
    found = watch(
        loaded, SparseAttention(decode=StreamingLLM(sinks=0, window=24)), PROMPT + PROMPT[:10], 79, page_size=8
    )
    assert found.density == pytest.approx(24 / 80)
    whole = watch(loaded, SparseAttention(decode=StreamingLLM(window=80)), PROMPT + PROMPT[:10], 79, page_size=8)
    assert (whole.recall, whole.density) == pytest.approx((1.0, 1.0))
    assert whole.nll(PROMPT[9:10]) == pytest.approx(-whole.logprobs[0, PROMPT[9]])


def test_policies_that_drop_tokens_are_refused(loaded):
    with pytest.raises(ValueError, match="policies that select pages, got one that drops tokens: H2O"):
        watch(loaded, SparseAttention(decode=H2O()), PROMPT, 60, page_size=8)


@pytest.mark.parametrize("num_prompt", [0, 80])
def test_a_text_needs_a_prompt_and_an_answer(loaded, num_prompt):
    with pytest.raises(ValueError, match=f"num_prompt must be within the text of 80 tokens, got {num_prompt}"):
        watch(loaded, None, PROMPT + PROMPT[:10], num_prompt)


@pytest.mark.parametrize("num_keys", [1, 4])
def test_a_needle_is_in_its_text_once(num_keys):
    needle = make_needle(50, num_keys, seed=5)
    name = needle.question.removesuffix(" is").split()[-1]
    assert needle.text.count(f"The secret code of {name} is{needle.answer}.") == 1
    assert needle.text.count("secret") == num_keys
    assert needle == make_needle(50, num_keys, seed=5) != make_needle(50, num_keys, seed=6)


@pytest.mark.full
def test_the_command_compares_policies_with_dense_attention(tiny_model, tmp_path, capsys, monkeypatch):
    text = tmp_path / "text"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40, encoding="utf-8")
    monkeypatch.setattr(compare_module, "ENOUGH", 0.0)  # a random model finds no needle
    command = [
        "eval",
        "--model",
        tiny_model,
        "--text",
        str(text),
        "--num-tokens",
        "128",
        "--num-needles",
        "1",
        "--page-size",
        "8",
    ]
    quest = {"policy": "quest", "layers": [0, None], "budget": 24}
    policies = {"decode": quest, "prefill": {"policy": "streaming_llm", "window": 24}}
    assert cli.run([*command, "--sparse-attention", json.dumps(policies), "--json"]) == 0
    dense, quest = json.loads(capsys.readouterr().out)
    assert list(dense) == list(quest) == ["policy", "needle", "needle of 4", "perplexity", "kl", "recall", "density"]
    assert (dense["policy"], dense["kl"], dense["recall"], dense["density"]) == ("dense", 0.0, 1.0, 1.0)
    assert quest["policy"] == "decode Quest(layers=(0, None), budget=24), prefill StreamingLLM(window=24)"
    assert quest["kl"] > 0
    assert 0 < quest["density"] < quest["recall"] < 1
    monkeypatch.undo()
    assert cli.run([*command[:3], *command[5:], "--sparse-attention", "magic"]) == 2
    assert "must name a policy among" in capsys.readouterr().err


def test_the_command_of_the_documentation_reaches_the_evaluation(tmp_path, monkeypatch, capsys):
    def stop(model, policies, text, **sizes):
        assert (model, text) == ("smollm2-135m", "Once")
        assert [policy.decode for policy in policies] == [Quest(), LServe(budget=256)]
        raise EngineDeadError("as far as the evaluation")

    page = (Path(__file__).parents[2] / "docs" / "sparse_attention.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^jaxserve eval .*", page, flags=re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare_module, "compare", stop)
    Path("book.txt").write_text("Once", encoding="utf-8")
    assert cli.run(shlex.split(line)[1:]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "error: as far as the evaluation"


def test_the_default_policies_are_known():
    assert len({resolve(wanted) for wanted in defaults(1024, 16)}) == 9
