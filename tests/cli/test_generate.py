import io
import json
import re
import shlex
from pathlib import Path

import pytest
from fakes import FakeEngine, FakeTokenizer

from jaxserve import RequestOutputKind, SamplingParams, StructuredOutputsParams
from jaxserve.cli import engine as driver
from jaxserve.cli.generate import TextWriter, read_prompts
from jaxserve.outputs import CompletionOutput, RequestOutput

MODEL = ("--model", "m", "--max-tokens", "3")


def output(request_id: str, text: str, *, finished: bool = False) -> RequestOutput:
    sample = CompletionOutput(index=0, text=text, token_ids=[])
    return RequestOutput(request_id=request_id, prompt=None, prompt_token_ids=[], outputs=[sample], finished=finished)


def test_one_prompt_streams_its_text_and_nothing_else(run):
    assert run("generate", *MODEL, "--prompt", "abcd")[:3] == (0, "40 41 42 \n", "")


def test_several_prompts_come_in_order_with_their_titles(run, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("bb\n\nccc\n")
    code, out, _, _ = run("generate", *MODEL, "--prompt", "a", "--prompt-file", str(file))
    assert code == 0
    assert out == "[1/3] a\n10 11 12 \n[2/3] bb\n20 21 22 \n[3/3] ccc\n30 31 32 \n"


def test_json_gives_one_object_a_prompt(run):
    code, out, _, _ = run("generate", *MODEL, "--prompt", "ab", "--prompt", "c", "--json")
    first, second = (json.loads(line) for line in out.splitlines())
    assert code == 0
    assert second["prompt"] == "c"
    assert first == {
        "prompt": "ab",
        "text": "20 21 22",
        "prompt_token_ids": [97, 98],
        "token_ids": [0, 1, 2],
        "finish_reason": "length",
        "metrics": {
            "num_prompt_tokens": 2,
            "num_output_tokens": 3,
            "num_cached_tokens": 0,
            "num_preemptions": 0,
            "queue_ms": 250.0,
            "ttft_ms": 500.0,
            "tpot_ms": 500.0,
            "e2el_ms": 1500.0,
        },
    }


def test_chat_puts_the_prompt_into_the_template(run):
    _, out, _, _ = run("generate", *MODEL, "--prompt", "ab", "--chat", "--json")
    assert json.loads(out)["prompt_token_ids"] == [97, 98]


def test_the_form_of_the_answer_comes_as_text_or_in_a_file(tmp_path):
    form = '{"json": {"type": "object"}, "disable_any_whitespace": true}'
    file = tmp_path / "form.json"
    file.write_text(form)
    expected = StructuredOutputsParams(json='{"type": "object"}', disable_any_whitespace=True)
    engine = FakeEngine()
    for given in (form, str(file)):
        assert driver.sampling_params(engine, {"structured_outputs": given}).structured_outputs == expected
    assert driver.sampling_params(engine, {}).structured_outputs is None


def test_the_command_of_the_docs_reaches_the_engine(run):
    page = (Path(__file__).parents[2] / "docs" / "structured_output.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"```sh\njaxserve (.*?)```", page, flags=re.DOTALL)
    code, out, _, _ = run(*shlex.split(command))
    assert (code, out[:6]) == (0, "80 81 ")


def test_the_command_of_the_page_on_the_kv_cache_reaches_the_engine(run):
    page = (Path(__file__).parents[2] / "docs" / "kv_cache.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"```sh\njaxserve (.*?)```", page, flags=re.DOTALL)
    code, _, _, llm = run(*shlex.split(command))
    assert (code, llm.options["kv_cache_dtype"]) == (0, "fp8")


def test_a_form_that_cannot_be_meant_is_a_mistake_of_the_caller(run, tmp_path):
    latin = tmp_path / "latin.json"
    latin.write_bytes(b"\xff")
    for given, message in [
        ("missing.json", "No such file or directory: missing.json"),
        (str(latin), "--structured-outputs must be JSON, or a file with it"),
        ("{", "--structured-outputs must be JSON, or a file with it"),
        ('{"a":' * 100_000, "--structured-outputs must be JSON, or a file with it"),
        ("{}", "structured_outputs must be exactly one of json, regex"),
        ('{"regex": "a", "choice": ["b"]}', "structured_outputs must be exactly one of json, regex"),
    ]:
        code, _, err, _ = run("generate", *MODEL, "--prompt", "a", "--structured-outputs", given)
        assert code == 2
        assert message in err


def test_an_answer_that_ends_in_an_error_says_why(capsys):
    sample = CompletionOutput(index=0, text="ab", token_ids=[], finish_reason="error", stop_reason="a dead end")
    failed = RequestOutput(request_id="0", prompt=None, prompt_token_ids=[], outputs=[sample], finished=True)
    TextWriter(["p"])(0, failed)
    assert capsys.readouterr() == ("ab\n", "error: a dead end\n")


def test_the_users_options_override_the_models_defaults_and_only_those_given_reach_the_engine(run):
    _, _, _, llm = run("generate", *MODEL, "--prompt", "a", "--page-size", "32", "--no-enable-prefix-caching")
    assert llm.options == {"model": "m", "warm_up": "off", "page_size": 32, "enable_prefix_caching": False}
    engine = FakeEngine()
    assert driver.sampling_params(engine, {}).temperature == 0.25
    assert driver.sampling_params(engine, {}).max_tokens == driver.DEFAULT_MAX_TOKENS
    given = driver.sampling_params(engine, {"temperature": 0.5, "stop": ["x"]})
    assert (given.temperature, given.stop) == (0.5, ("x",))


def test_no_prompt_is_a_clear_error(run, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_text("\n \n")
    for arguments in ((), ("--prompt-file", str(empty))):
        code, out, err, _ = run("generate", *MODEL, *arguments)
        assert (code, out) == (2, "")
        assert err == "error: no prompt to answer: give --prompt TEXT or a --prompt-file that is not empty\n"


def test_prompts_keep_their_spaces(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("  two \nthree\n")
    assert read_prompts(["one"], file) == ["one", "  two ", "three"]


def test_a_prompt_ends_with_its_line_and_with_no_other_separator(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\u2028still one\x0b\r\ntwo\n", encoding="utf-8", newline="")
    assert read_prompts([], file) == ["one\u2028still one\x0b", "two"]


def test_bytes_that_are_no_text_are_told_in_one_line(run, monkeypatch, tmp_path):
    file = tmp_path / "prompts.bin"
    file.write_bytes(b"\xff\xfe")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n"), encoding="utf-8"))
    for arguments in (("generate", *MODEL, "--prompt-file", str(file)), ("chat", "--model", "m")):
        code, out, err, _ = run(*arguments)
        assert (code, out) == (2, "")
        assert "must be" in err.splitlines()[-1]
        assert "can't decode byte 0xff" in err.splitlines()[-1]
    code, _, err, _ = run("chat", "--model", "m", "--system", "\udcff")
    assert code == 2
    assert err.startswith("error: --system must be UTF-8 text")


def test_chat_goes_on_after_messages_that_the_template_refuses(run, monkeypatch):
    def refuse(*_, **__):
        raise ValueError("roles must alternate")

    monkeypatch.setattr(FakeTokenizer, "apply_chat_template", refuse)
    monkeypatch.setattr("sys.stdin", io.StringIO("a\nb\n"))
    code, _, err, _ = run("chat", "--model", "m")
    assert code == 0
    assert err.count("error: roles must alternate (/reset starts over)\n") == 2


def test_later_requests_wait_and_the_first_flows():
    seen = []

    def source():
        for item in (
            output("b", "1"),
            output("a", "2"),
            output("b", "3", finished=True),
            output("a", "4", finished=True),
        ):
            seen.append(f"in {item.outputs[0].text}")
            yield item

    for item in driver.in_order(source(), ["a", "b"]):
        seen.append(f"out {item.outputs[0].text}")
    assert seen == ["in 1", "in 2", "out 2", "in 3", "in 4", "out 4", "out 1", "out 3"]


def test_closing_a_stream_aborts_what_runs():
    engine = FakeEngine()
    outputs = driver.stream(
        engine, {"a": [1], "b": [2]}, SamplingParams(max_tokens=2, output_kind=RequestOutputKind.DELTA)
    )
    next(outputs)
    outputs.close()
    assert engine.aborted == ["a", "b"]
    assert not engine.has_unfinished_requests()


def test_chat_remembers_resets_and_leaves(run, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("ab\n\nc\n/reset\ndddd\n/exit\nnever\n"))
    code, out, err, _ = run("chat", "--model", "m", "--max-tokens", "1")
    assert code == 0
    # prompts: "ab"; "ab|20 |c"; "dddd"
    assert out == "20 \n80 \n40 \n"
    assert "/reset" in err


def test_chat_prints_each_answer_as_one_object(run, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("ab\ncd\n"))
    code, out, _, _ = run("chat", "--model", "m", "--max-tokens", "2", "--json")
    assert code == 0
    first, second = map(json.loads, out.splitlines())
    assert (first["prompt"], second["prompt"]) == ("ab", "cd")
    assert len(first["token_ids"]) == 2
    assert first["text"]
    assert len(second["prompt_token_ids"]) > len(first["prompt_token_ids"])  # it remembers


def test_chat_goes_on_after_a_request_that_is_refused(run, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("ab\n"))
    monkeypatch.setattr(driver, "chat_prompt", lambda engine, messages: [])
    code, _, err, _ = run("chat", "--model", "m")
    assert code == 0
    assert "error: the prompt is empty (/reset starts over)" in err


@pytest.mark.parametrize("name", ["--temperature", "--top-p"])
def test_a_sampling_value_out_of_range_is_named(run, name):
    code, _, err, _ = run("generate", *MODEL, "--prompt", "a", name, "7")
    assert code == 2
    assert err.startswith(f"error: {name[2:].replace('-', '_')} must be")
    assert err.count("\n") == 1


def test_generate_profiles_its_run(run, tmp_path):
    code, _, _, llm = run("generate", *MODEL, "--prompt", "ab", "--profile", str(tmp_path))
    assert code == 0
    assert llm.profile == [str(tmp_path), 0, 3]
