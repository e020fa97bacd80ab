"""What `jaxserve eval` finds is what the engine would do."""

import json
import re
import shlex
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import LLM, EngineDeadError, SamplingParams, cli, weights
from jaxserve.cli.evaluate import defaults, draw
from jaxserve.evaluation import compare as compare_module, watch
from jaxserve.evaluation.compare import Comparison
from jaxserve.evaluation.watch import Reader
from jaxserve.evaluation.watched import Watched
from jaxserve.layers.sparse import H2O, LServe, Quest, SparseAttention, StreamingLLM, resolve

POLICY = SparseAttention(decode=LServe(budget=24, parts=2, reselect=3, layers=(1, None)))
PROMPT = np.random.default_rng(3).integers(3, 300, 70).tolist()
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
QUEST = {"policy": "quest", "layers": [0, None], "budget": 24}
BOTH = {"decode": QUEST, "prefill": {"policy": "streaming_llm", "window": 24}}


@pytest.fixture(scope="module")
def loaded(tiny_model):
    return weights.load(tiny_model, dtype=jnp.float32, progress=False)


@pytest.fixture
def reader(loaded, monkeypatch) -> Reader:
    """One that needs several passes for a prompt."""
    monkeypatch.setattr(watch, "CHUNK", 32)
    return Reader(loaded, max_tokens=96, page_size=8)


@pytest.mark.parametrize("sparse", [POLICY, pytest.param(resolve(BOTH), marks=pytest.mark.full)])
def test_a_pass_over_an_answer_says_what_decoding_says(tiny_model, reader, sparse):
    options = {"dtype": "float32", "max_model_len": 96, "page_size": 8, "num_pages": 26, "max_num_seqs": 2}
    llm = LLM(tiny_model, sparse_attention=sparse, warm_up="off", **options)
    answer = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    llm.close()
    found = reader.ask(reader.read(PROMPT, sparse), answer)
    assert found.says(answer)
    shared = reader.read(PROMPT)
    dense = reader.ask(shared, answer)
    assert not dense.says(answer)
    assert found.kl_from(dense) > 1e-3
    assert (dense.kl_from(dense), dense.recall, dense.density) == (0.0, 1.0, 1.0)
    assert found.density < found.recall < 1
    same = reader.ask(shared, answer)  # a question leaves the prompt as it was
    np.testing.assert_array_equal(same.logprobs, dense.logprobs)


def test_policies_share_a_prompt_that_none_of_them_is_for(reader):
    shared = reader.read(PROMPT)
    for sparse in (POLICY, SparseAttention(decode=Quest(budget=24, layers=(0, None)))):
        found, own = (reader.ask(p, PROMPT[:20]) for p in (reader.under(shared, sparse), reader.read(PROMPT, sparse)))
        np.testing.assert_array_equal(found.logprobs, own.logprobs)
        assert found.recall < 1
    with pytest.raises(ValueError, match="the prompt was read under None, and cannot be asked under SparseAttention"):
        reader.under(shared, resolve(BOTH))
    with pytest.raises(ValueError, match=r"the prompt was read under SparseAttention.* and cannot be asked under None"):
        reader.under(reader.under(shared, POLICY), None)


def test_recall_and_density_are_those_of_what_is_read(reader):
    """Of 80 positions, the last of which is decoded, a window of 24 has the last three pages of 8."""

    def window(sinks: int, window: int) -> SparseAttention:
        return SparseAttention(decode=StreamingLLM(sinks=sinks, window=window))

    prompt, answer = reader.read(PROMPT + PROMPT[:9]), PROMPT[9:11]
    found = reader.ask(reader.under(prompt, window(0, 24)), answer)
    assert found.density == pytest.approx(24 / 80)
    whole = reader.ask(reader.under(prompt, window(4, 80)), answer)
    assert (whole.recall, whole.density) == pytest.approx((1.0, 1.0))
    assert whole.nll(answer) == pytest.approx(-np.mean(whole.logprobs[[0, 1], answer]))


def test_what_cannot_be_read_or_asked_is_refused(loaded, reader):
    for prompt in ([], PROMPT + PROMPT[:26]):
        with pytest.raises(ValueError, match=f"a prompt must have 1 to 95 tokens, got {len(prompt)}"):
            reader.read(prompt)
    prompt = reader.read(PROMPT)
    with pytest.raises(ValueError, match="policies that select pages, got one that drops tokens: H2O"):
        reader.under(prompt, SparseAttention(decode=H2O()))
    for answer in ([], PROMPT[:27]):
        with pytest.raises(ValueError, match=f"an answer may have 1 to 26 tokens, got {len(answer)}"):
            reader.ask(prompt, answer)
    with pytest.raises(ValueError, match="num_tokens must be at most 512, the model's context, got 513"):
        Reader(loaded, max_tokens=513, page_size=8)


def test_says_takes_the_whole_answer():
    logprobs = np.log(np.eye(4)[[3, 1, 2]] * 0.7 + 0.1)
    found = Watched(logprobs, np.zeros(3))
    assert found.says([1, 2])
    assert found.says([3, 1, 2])
    assert not found.says([0, 1, 2])
    assert not found.says([3, 1, 0])


@pytest.fixture
def evaluate(tiny_model, tmp_path, capsys):
    """Runs the command on a small text; returns its exit code, what it printed, and its complaint."""
    text = tmp_path / "text"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20, encoding="utf-8")
    command = ["eval", "--model", tiny_model, "--text", str(text), "--num-tokens", "192", "--page-size", "8"]

    def run(*more: str):
        code = cli.run([*command, *more])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.mark.full
def test_the_command_compares_policies_with_dense_attention(evaluate, tmp_path, monkeypatch):
    monkeypatch.setattr(compare_module, "ENOUGH", 0.0)  # a random model finds no needle
    policies = ["--sparse-attention", json.dumps(BOTH), "--sparse-attention", "streaming_llm"]
    files = [tmp_path / name for name in ("plot.svg", "result.json")]
    more = ["--num-samples", "1", "--task", "needle", "--plot", str(files[0]), "--output-json", str(files[1])]
    code, printed, _ = evaluate(*policies, *more, "--json")
    assert code == 0
    result = json.loads(printed)
    assert result == json.loads(files[1].read_text(encoding="utf-8"))
    dense, quest, streaming = result["rows"]
    assert list(dense) == list(quest) == ["policy", "needle", "perplexity", "kl", "recall", "density", "s/token"]
    assert (dense["policy"], dense["kl"], dense["recall"], dense["density"]) == ("dense", 0.0, 1.0, 1.0)
    assert quest["policy"] == "decode Quest(layers=(0, None), budget=24), prefill StreamingLLM(window=24)"
    assert streaming["policy"] == "StreamingLLM()"
    assert quest["kl"] > 0
    assert 0 < quest["density"] < quest["recall"] < 1
    assert all(row["s/token"] > 0 for row in result["rows"])
    assert "accuracy" in files[0].read_text(encoding="utf-8")


@pytest.mark.full
def test_a_task_that_dense_attention_does_not_solve_is_left_out(evaluate):
    policies = ["--sparse-attention", "streaming_llm", "--no-speed"]
    code, printed, said = evaluate(*policies, "--num-samples", "2", "--task", "needle")
    assert code == 0
    assert "perplexity" in printed
    assert "needle" not in printed
    assert "left out: needle, of which dense attention solves 0%" in said


def test_a_plot_joins_what_differs_in_fields_alone(tmp_path):
    shares = {"recall": 1.0, "density": 0.5}
    names = ["dense", "Quest(layers=(0, None), budget=24)", "Quest()", "decode Quest(), prefill StreamingLLM(window=8)"]
    rows = [{"policy": name, "needle": 1.0, "perplexity": 9.0, "kl": 0.1, **shares} for name in names]
    draw(Comparison(rows, {}), tmp_path / "plot.svg")
    written = (tmp_path / "plot.svg").read_text(encoding="utf-8")
    found = re.findall("<!-- (.*?) -->", written)
    assert {"accuracy", "perplexity", "density"} < set(found)
    assert [name for name in found if "dense" in name or "Quest" in name] == [
        "dense",
        "Quest",
        "decode Quest, prefill StreamingLLM",
    ]
    with pytest.raises(ValueError, match="nothing to draw, as dense attention solves no task"):
        draw(Comparison([{"policy": "dense", **shares}], {"needle": 0.0}), tmp_path / "plot.svg")


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--sparse-attention", "magic"], "sparse_attention must name a policy among"),
        (["--num-tokens", "4096"], "num_tokens must be at most 512, the model's context, got 4096; lower"),
        (["--num-tokens", "500", "--num-samples", "0"], r"text must have at least 500 tokens, got \d+; lengthen it"),
        (["--num-tokens", "64"], r"num_tokens must be at least \d+ for the task 'needle', got 64; raise"),
        (["--task", "sums"], "tasks must be among .*'needle', .* got .'sums'"),
        (["--sparse-attention", '{"policy": "quest", "layers": [5, null]}'], "must lie within the model's 3"),
        (["--plot", "figure.magic"], "--plot must end in one of"),
        (["--model", "retrieval"], "the retrieval model knows no language: leave the text out"),
    ],
)
def test_what_cannot_be_compared_is_told(evaluate, more, reason):
    policies = [] if "--sparse-attention" in more else ["--sparse-attention", "streaming_llm"]
    code, _, said = evaluate(*policies, *more)
    assert code == 2
    assert re.search(reason, said)


def test_the_command_of_the_documentation_reaches_the_evaluation(tmp_path, monkeypatch):
    def stop(model, policies, text, **options):
        asked.append((model, [policy.decode for policy in policies], text, options["num_tokens"]))
        raise EngineDeadError("as far as the evaluation")

    asked = []
    page = (Path(__file__).parents[2] / "docs" / "sparse_attention.md").read_text(encoding="utf-8")
    lines = re.findall(r"^jaxserve eval .*", page, flags=re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare_module, "compare", stop)
    Path("book.txt").write_text("Once", encoding="utf-8")
    assert [cli.run(shlex.split(line)[1:]) for line in lines] == [1, 1]
    assert asked == [
        ("smollm2-135m", [Quest(), LServe(budget=256)], "Once", 1024),
        ("retrieval", [Quest(), Quest(budget=256)], None, 131072),
    ]


def test_the_default_policies_are_known():
    assert len({resolve(wanted) for wanted in defaults(1024, 16)}) == 9
