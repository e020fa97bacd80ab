"""Batch jobs over a fake engine: what a row may look like, what it gets back, in which order."""

import contextlib
import json
import sys
import time
from types import SimpleNamespace

import pytest

from jaxserve.batch import BadRow, JsonLines, Row, parse_row, run_batch
from jaxserve.cli import run as run_command
from jaxserve.exceptions import EngineDeadError, RequestError
from jaxserve.outputs import CompletionOutput, Logprob, RequestOutput
from jaxserve.sampling_params import SamplingParams


class FakeEngine:
    """Echoes the prompt's characters as tokens; the later a request came, the sooner it ends."""

    def __init__(self):
        self.tokenizer = SimpleNamespace(apply_chat_template=self._template)
        self.default_sampling_params = SamplingParams(temperature=0.5)
        self.running = {}
        self.most_running = 0
        self.aborted = []

    @staticmethod
    def _template(messages, *, add_generation_prompt, tokenize):
        if any("role" not in message for message in messages):
            raise ValueError("a message needs a role")
        return [ord(c) for c in "".join(message["content"] for message in messages)]

    def add_request(self, request_id, prompt, params):
        if prompt == "too long":
            raise RequestError("prompt has 9 tokens, max_model_len is 8")
        self.running[request_id] = (prompt, params)
        self.most_running = max(self.most_running, len(self.running))

    def step(self):
        request_id, (prompt, params) = self.running.popitem()
        tokens = [ord(c) for c in prompt] if isinstance(prompt, str) else prompt
        logprobs = None
        if params.logprobs is not None:
            logprobs = [{t: Logprob(-1.0, 2, chr(t)), 0: Logprob(-0.5, 1, "\0")} for t in tokens]
        sample = CompletionOutput(
            index=0, text="".join(map(chr, tokens)), token_ids=tokens, finish_reason="stop", logprobs=logprobs
        )
        return [
            RequestOutput(request_id=request_id, prompt=None, prompt_token_ids=tokens, outputs=[sample], finished=True)
        ]

    def abort_request(self, request_ids):
        self.aborted += request_ids


@pytest.fixture
def engine():
    return FakeEngine()


def run(engine, tmp_path, rows):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    totals = run_batch(engine, JsonLines(source), target, model_name="demo")
    return [json.loads(line) for line in target.read_text().splitlines()], totals


def chat(text, **options):
    return {"messages": [{"role": "user", "content": text}], **options}


def parse(row):
    return parse_row((0, json.dumps(row).encode()))


def test_answers_come_in_the_order_of_the_rows_with_their_ids(engine, tmp_path):
    rows = [{"custom_id": f"id-{i}", "prompt": f"prompt {i}"} for i in range(20)]
    lines, totals = run(engine, tmp_path, rows)
    assert [line["custom_id"] for line in lines] == [row["custom_id"] for row in rows]
    assert [line["response"]["body"]["choices"][0]["text"] for line in lines] == [row["prompt"] for row in rows]
    assert (totals.done, totals.failed) == (20, 0)
    assert totals.generated_tokens == sum(len(row["prompt"]) for row in rows)


def test_an_openai_chat_row_gets_a_chat_completion(engine, tmp_path):
    body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 5}
    row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (line,), _ = run(engine, tmp_path, [row])
    answer = line["response"]["body"]
    assert line["error"] is None
    assert line["response"]["status_code"] == 200
    assert (answer["object"], answer["model"]) == ("chat.completion", "demo")
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "hi"}
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    assert abs(answer["created"] - time.time()) < 60


def test_bad_rows_get_an_error_and_stop_no_other(engine, tmp_path):
    bad = {
        "not json": "{",
        "not an object": "[1]",
        "no prompt": {"custom_id": "x"},
        "several prompts": {"prompt": ["a", "b"]},
        "unknown option": {"prompt": "a", "temprature": 1},
        "out of range": {"prompt": "a", "temperature": 9},
        "not served yet": {"prompt": "a", "flat_logprobs": True},
        "no constraint": {"prompt": "a", "structured_outputs": {}},
        "wrong url": {"body": {"prompt": "a"}, "url": "/v1/embeddings"},
        "wrong model": {"prompt": "a", "model": "gpt-4"},
        "streaming": {"prompt": "a", "stream": True},
        "no role": {"messages": [{"content": "a"}]},
        "refused by the engine": {"prompt": "too long"},
    }
    rows = [row for entry in bad.values() for row in (entry, {"prompt": "good"})]
    lines, totals = run(engine, tmp_path, rows)
    assert [line["error"] is None for line in lines] == [False, True] * len(bad)
    assert all((line["response"] is None) == (line["error"] is not None) for line in lines)
    assert (totals.done, totals.failed) == (2 * len(bad), len(bad))
    messages = dict(zip(bad, [line["error"]["message"] for line in lines[::2]], strict=True))
    assert messages["out of range"] == "temperature must be in [0, 2], got 9"
    assert messages["unknown option"] == (
        "temprature must be left out: it is no sampling parameter (did you mean temperature?), got 1"
    )
    assert totals.first_failure.startswith("row-0: the row is not JSON: ")
    assert messages["not json"].startswith("the row is not JSON: ")
    assert messages["wrong model"] == "model must be 'demo', the one that is loaded, got 'gpt-4'"
    assert "max_model_len is 8" in messages["refused by the engine"]
    assert lines[4]["custom_id"] == "x"


def test_a_hostile_row_costs_only_its_own_line(engine, tmp_path):
    hostile = {
        "an id that is no text": '{"custom_id": "\\ud800", "prompt": "too long"}',
        "a key that is no text": '{"prompt": "a", "\\ud800": 1}',
        "lists without end": "[" * 100_000,
        "objects without end": '{"prompt": "a", "extra_args": ' + '{"a":' * 5000 + "1" + "}" * 5001,
        "a list for a url": {"url": [], "body": {}},
        "an object for a url": {"url": {}, "body": {}},
        "a message that is no object": {"messages": ["role", 1]},
        "a message without content": {"messages": [{"role": "user"}]},
    }
    lines, totals = run(engine, tmp_path, [row for entry in hostile.values() for row in (entry, {"prompt": "good"})])
    assert [line["error"] is None for line in lines] == [False, True] * len(hostile)
    assert totals.failed == len(hostile)
    messages = dict(zip(hostile, [line["error"]["message"] for line in lines[::2]], strict=True))
    assert lines[0]["custom_id"] == "\ud800"
    assert messages["lists without end"] == messages["objects without end"] == "the row is nested too deeply"
    assert messages["a list for a url"] == "url must be one of /v1/chat/completions, /v1/completions, got []"
    assert messages["a message without content"] == "KeyError: 'content'"


def test_a_dead_engine_ends_the_job(engine, tmp_path):
    def die(*_):
        raise EngineDeadError("the engine stopped")

    engine.add_request = die
    with pytest.raises(EngineDeadError):
        run(engine, tmp_path, [{"prompt": "a"}])


def test_null_is_the_default_of_a_sampling_option_and_no_excuse_for_an_unknown_one(engine, tmp_path):
    seen = []
    add = engine.add_request
    engine.add_request = lambda id_, prompt, params: (seen.append(params), add(id_, prompt, params))
    nulls = dict.fromkeys(("temperature", "top_p", "n", "stop", "max_tokens", "logprobs", "stream"))
    lines, _ = run(
        engine, tmp_path, [{"prompt": "a", **nulls}, chat("a", **nulls), {"prompt": "a", "temprature": None}]
    )
    assert [line["error"] is None for line in lines] == [True, True, False]
    assert [(params.temperature, params.max_tokens) for params in seen] == [(0.5, 16), (0.5, None)]


def test_only_a_window_of_rows_is_in_the_engine(engine, tmp_path):
    run(engine, tmp_path, [{"prompt": str(i)} for i in range(200)])
    assert 1 < engine.most_running <= 64


def test_the_models_defaults_hold_where_a_row_is_silent(engine, tmp_path):
    seen = []
    add = engine.add_request
    engine.add_request = lambda id_, prompt, params: (seen.append(params), add(id_, prompt, params))
    run(engine, tmp_path, [{"prompt": "a"}, {"prompt": "a", "temperature": 0.0}, chat("a")])
    assert [params.temperature for params in seen] == [0.5, 0.0, 0.5]
    assert [params.max_tokens for params in seen] == [16, 16, None]  # a chat goes on until its end


def test_chat_logprobs_hold_the_sampled_token_and_the_top(engine, tmp_path):
    (line,), _ = run(engine, tmp_path, [chat("A", logprobs=True, top_logprobs=1)])
    (entry,) = line["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("A", -1.0, [65])
    assert [top["token"] for top in entry["top_logprobs"]] == ["\0"]


def test_completion_logprobs_are_lists_by_token(engine, tmp_path):
    (line,), _ = run(engine, tmp_path, [{"prompt": "AB", "logprobs": 1}])
    logprobs = line["response"]["body"]["choices"][0]["logprobs"]
    assert (logprobs["tokens"], logprobs["token_logprobs"]) == (["A", "B"], [-1.0, -1.0])
    assert logprobs["top_logprobs"][0] == {"A": -1.0, "\0": -0.5}


def test_the_input_is_never_overwritten(engine, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n')
    with pytest.raises(ValueError, match="another file than the input"):
        run_batch(engine, JsonLines(source), source, model_name="demo")
    assert source.read_text() == '{"prompt": "a"}\n'


def test_an_interrupted_run_leaves_no_request_behind(engine, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n' * 3)

    def interrupt():
        raise KeyboardInterrupt

    engine.step = interrupt
    with pytest.raises(KeyboardInterrupt):
        run_batch(engine, JsonLines(source), tmp_path / "out.jsonl", model_name="demo")
    assert engine.aborted == ["batch-0", "batch-1", "batch-2"]


def test_lines_are_found_by_index_and_empty_ones_are_no_rows(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes('{"a": "é"}\n\n  \n{"b": 2}'.encode())
    lines = JsonLines(path)
    assert len(lines) == 2
    assert json.loads(lines[0][1]) == {"a": "é"}
    assert lines[1] == (1, b'{"b": 2}')


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"prompt": "a"}, "completion"),
        ({"prompt": [1, 2]}, "completion"),
        ({"messages": [{"role": "user", "content": "a"}]}, "chat"),
        ({"url": "/v1/completions", "body": {"prompt": "a"}}, "completion"),
        ({"url": "/v1/chat/completions", "body": {"messages": [{}]}}, "chat"),
    ],
)
def test_a_rows_kind_follows_its_url_or_its_fields(row, kind):
    parsed = parse(row)
    assert isinstance(parsed, Row)
    assert (parsed.kind, parsed.custom_id) == (kind, "row-0")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"body": []}, "url must be one of"),
        ({"body": [], "url": "/v1/completions"}, "body must be a JSON object, got list"),
        ({"body": {}, "url": "/v1/completions", "method": "GET"}, "method must be 'POST', got 'GET'"),
        ({"messages": "hi"}, "messages must be a non-empty list"),
        ({"prompt": ""}, "prompt must be a non-empty string"),
        ({"prompt": [1, True]}, "prompt must be one string or one list of token ids"),
        ({"messages": [{}], "logprobs": 3}, "logprobs must be true or false in a chat"),
        ({"messages": [{}], "top_logprobs": 3}, "top_logprobs=3 needs logprobs=true"),
    ],
)
def test_an_unreadable_row_says_why(row, message):
    parsed = parse(row)
    assert isinstance(parsed, BadRow)
    assert message in parsed.message


# --------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def command(engine, monkeypatch, capfd):
    """Runs `jaxserve batch ...` over the fake engine -> (exit code, stdout, stderr)."""
    llm = contextlib.nullcontext(SimpleNamespace(llm_engine=engine))
    monkeypatch.setattr("jaxserve.cli.engine.start", lambda options: llm)

    def command(*arguments):
        code = run_command(["batch", "--model", "demo", *map(str, arguments)])
        return code, *capfd.readouterr()

    return command


def test_the_command_prints_its_totals(command, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "abc"}\n{"prompt": 7}\n')
    code, out, err = command(source, target, "--json")
    totals = json.loads(out)
    assert code == 0
    assert (totals["rows"], totals["failed"], totals["prompt_tokens"], totals["generated_tokens"]) == (2, 1, 3, 3)
    assert totals["generated_tokens_per_s"] == pytest.approx(3 / totals["elapsed_s"])
    assert err == "first failure: row-1: prompt must be a non-empty string or list of token ids\n"
    assert target.read_text().count("\n") == 2
    code, out, _ = command(source, target)
    assert out.startswith("2 rows, 1 failed, 3 tokens in ")


def test_a_missing_input_is_told_in_one_line(command, tmp_path):
    code, out, err = command(tmp_path / "none.jsonl", tmp_path / "out.jsonl")
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert "none.jsonl" in err


def test_without_grain_the_command_says_what_to_install(command, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    monkeypatch.delitem(sys.modules, "jaxserve.batch")
    code, _, err = command(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert code == 2
    assert 'pip install "jaxserve[batch]", or in a checkout: .venv/bin/pip install -e ".[batch]"' in err
