"""The texts of `jaxserve eval` hold the answers that are asked for, and the retrieval model finds them."""

import re
from collections import Counter

import pytest

from jaxserve import LLM, SamplingParams, weights
from jaxserve.evaluation import retrieval
from jaxserve.evaluation.compare import compare, fitted
from jaxserve.evaluation.tasks import TASKS
from jaxserve.layers.sparse import LServe, Quest, SparseAttention, StreamingLLM


@pytest.mark.parametrize("name", [*TASKS, *retrieval.TASKS])
def test_a_seed_says_what_a_sample_is(name):
    task = {**TASKS, **retrieval.TASKS}[name]
    assert task(50, 5) == task(50, 5) != task(50, 6)
    assert task(1, 5).questions


@pytest.mark.parametrize(("name", "num_keys"), [("needle", 1), ("needle of 4", 4)])
def test_a_needle_is_in_its_text_once(name, num_keys):
    text, questions = TASKS[name](50, 5)
    assert len(questions) == text.count("secret") == num_keys
    assert len(text.split(". ")) == 50 + num_keys
    for question, answer in questions:
        person = question.removesuffix(" is").split()[-1]
        assert text.count(f"The secret code of {person} is{answer}.") == 1


def test_variables_have_the_number_that_their_chain_begins_with():
    text, questions = TASKS["variable tracking"](50, 5)
    known: dict[str, str] = {}
    for variable, number, other in re.findall(r"Variable (\w+) is (?:(\d+)|the same as variable (\w+))\.", text):
        known[variable] = number or known[other]  # in the order of the text
    assert len(known) == 10
    for question, answer in questions:
        (number,) = set(re.findall(r"\d{5}", question))
        assert answer == " " + ", ".join(name for name, value in known.items() if value == number)
        assert answer.count(",") == 4


@pytest.mark.parametrize("name", ["common words", "frequent words"])
@pytest.mark.parametrize("length", [1, 30, 45, 60, 1000])
def test_the_most_frequent_words_are_those_in_falling_order(name, length):
    text, [(_, answer)] = TASKS[name](length, 5)
    counts = Counter(text.removeprefix("A list of words: ").removesuffix(".").split()).most_common(4)
    assert answer == " " + ", ".join(word for word, _ in counts[:3])
    assert len({count for _, count in counts}) == len(counts)  # none is as frequent as the next
    if length == 1000:
        assert 900 < text.count(" ") < 1100


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("retrieval")
    retrieval.write(folder)
    return str(folder)


def test_a_sample_is_nearly_as_long_as_may_be(folder):
    tokenizer = weights.load(folder, progress=False).tokenizer
    assert tokenizer is not None
    for num_tokens in (100, 1000, 3000):
        text = fitted(tokenizer, "lookup", retrieval.lookup, num_tokens, 0)
        assert 0.94 * num_tokens - 32 < len(text.token_ids) + 2 <= num_tokens
    with pytest.raises(ValueError, match="num_tokens must be at least 35 for the task 'lookup', got 20"):
        fitted(tokenizer, "lookup", retrieval.lookup, 20, 0)


@pytest.mark.parametrize(
    ("sample", "max_model_len"),
    [
        (retrieval.crowded_lookup(200, seed=3), 1024),
        pytest.param(retrieval.lookup(4090, seed=3), 131072, marks=pytest.mark.full),
    ],
)
def test_the_engine_serves_the_retrieval_model(folder, sample, max_model_len):
    text, questions = sample
    options = {"max_num_batched_tokens": 4096, "max_num_seqs": 4, "warm_up": "off", "sparse_attention": "quest"}
    llm = LLM(folder, max_model_len=max_model_len, **options)
    prompts = [text + question.text for question in questions]
    answers = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    llm.close()
    assert [output.outputs[0].text.split() for output in answers] == [[answer.strip()] for _, answer in questions]


def test_the_retrieval_model_finds_all_at_4k_and_less_with_too_small_a_budget():
    policies = [
        SparseAttention(decode=policy)
        for policy in (Quest(budget=4096), Quest(budget=96), Quest(budget=48), StreamingLLM(window=1020))
    ]
    options = {"num_tokens": 4096, "num_samples": 2, "page_size": 16, "speed": False}
    passes = []
    progress = {"on_progress": lambda done, total: passes.append((done, total))}
    found = compare("retrieval", policies, None, **options, **progress, tasks=["crowded lookup"])
    assert [done for done, _ in passes] == list(range(1, passes[-1][1] + 1))
    assert not found.left_out
    dense, whole, more, less, window = (row["crowded lookup"] for row in found.rows)
    assert dense == whole == 1.0
    assert 1.0 > more > less > 0.0
    assert 0.0 < window < 0.5  # as many as lie in a quarter of the text
    assert found.rows[1]["density"] == 1.0
    assert found.rows[3]["density"] < 0.02


@pytest.mark.full
def test_the_retrieval_model_finds_all_at_128k():
    policies = [SparseAttention(decode=policy) for policy in (Quest(budget=2048), Quest(budget=48), LServe(budget=512))]
    options = {"num_tokens": 131072, "num_samples": 1, "page_size": 16, "speed": False}
    found = compare("retrieval", policies, None, **options)
    dense, many, few, lserve = found.rows
    assert not found.left_out
    assert dense["lookup"] == dense["crowded lookup"] == 1.0
    assert many["lookup"] == few["lookup"] == 1.0
    assert 1.0 >= many["crowded lookup"] > few["crowded lookup"]
    assert lserve["lookup"] == lserve["crowded lookup"] == 1.0
    assert many["density"] < 0.017
