import dataclasses
import importlib.metadata
import os
import subprocess
import sys

import pytest

from jaxserve import EngineDeadError, SamplingParams, WeightsError, cli, config
from jaxserve.cli import engine as driver
from jaxserve.cli.options import ENGINE_OPTIONS, SAMPLING_OPTIONS
from jaxserve.cli.output import readable, show

GROUPS = [group.type for group in dataclasses.fields(config.EngineConfig)]


def test_every_shared_option_is_one_of_the_library():
    engine = {field.name for group in GROUPS for field in dataclasses.fields(group)}
    sampling = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(ENGINE_OPTIONS) <= engine
    assert set(SAMPLING_OPTIONS) <= sampling


def shown(value: object) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def test_help_tells_the_defaults_of_the_library():
    fields = [field for group in (*GROUPS, SamplingParams) for field in dataclasses.fields(group)]
    defaults = {field.name: field.default for field in fields}
    defaults["max_tokens"] = driver.DEFAULT_MAX_TOKENS
    for name, option in (ENGINE_OPTIONS | SAMPLING_OPTIONS).items():
        if option.default is None and defaults[name] is not None:
            told = option.unset.removeprefix("the model's, else ").split(";")[0]
            assert told == shown(defaults[name]), name


@pytest.mark.parametrize(
    "command", ["generate", "chat", "serve", "batch", "bench serve", "bench latency", "bench throughput"]
)
def test_help_shows_every_name_in_full_on_80_columns(run, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _, _ = run(*command.split(), "--help")
    assert code == 0
    for name in ENGINE_OPTIONS:
        assert f"--{name.replace('_', '-')} " in out
    assert max(map(len, out.splitlines())) <= 80


def test_the_serving_benchmark_explains_its_measures(run):
    _, out, _, _ = run("bench", "serve", "--help")
    for words in ("time to first token", "time per output token", "inter-token latency", "end-to-end latency"):
        assert words in " ".join(out.split())


@pytest.mark.parametrize("group", [(), ("bench",)])
def test_without_a_command_there_is_help_and_no_error(run, group):
    code, out, err, _ = run(*group)
    assert (code, out) == (2, "")
    assert err.startswith("Usage: jaxserve ")
    assert "error" not in err


def test_the_version_is_that_of_the_package(run):
    assert run("--version")[:3] == (0, f"jaxserve {importlib.metadata.version('jaxserve')}\n", "")


def test_an_interrupted_command_leaves_without_waiting_for_its_threads():
    program = """
import atexit, sys, time
from jaxserve import cli

def interrupted(options):
    atexit.register(time.sleep, 60)
    raise KeyboardInterrupt

cli.bench.serve.bench_engine.driver.start = interrupted
sys.argv[1:] = ["bench", "serve", "--model", "m"]
cli.main()
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=50, check=False)
    assert (result.returncode, result.stderr) == (130, b"")


def test_help_imports_nothing_heavy():
    program = (
        "import sys; from jaxserve import cli; code = cli.run(['--help']); "
        "heavy = {'jax', 'numpy', 'matplotlib', 'tokenizers', 'huggingface_hub'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    for command in ("generate", "chat", "serve", "convert", "info", "bench"):
        assert command in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "--model", "m", "--prompt", "a", "--wrong", "1"), "No such option: --wrong"),
        (("generate", "--prompt", "a"), "Missing option '--model'"),
        (("generate", "--model", "m", "--max-tokens", "many"), "Invalid value for '--max-tokens'"),
        (("generate", "--model", "m", "Hi"), "argument(s) (Hi): give a prompt with --prompt"),
        (("serve-all",), "No such command 'serve-all'"),
        (("generate", "--model", "m", "--prompt-file", "/none/there"), "No such file or directory: /none/there"),
        (("bench", "serve", "--model", "m", "--request-rate", "0"), "request_rate must be above 0"),
        (("bench", "serve", "--model", "m", "--random-range-ratio", "2"), "range_ratio must be in [0, 1), got 2.0"),
        (("generate", "--model", "m", "--prompt", "\udcff"), "--prompt must be UTF-8 text"),
        (("info", "--load-format", "zzz"), "--load-format must be auto or dummy, got 'zzz'"),
        (("bench", "latency", "--model", "m", "--num-iters-warmup", "-1"), "Invalid value for '--num-iters-warmup'"),
    ],
)
def test_a_callers_mistake_is_one_line_and_exit_code_2(run, arguments, message):
    code, out, err, _ = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def run_raising(monkeypatch, error: BaseException) -> int:
    def start(options):
        raise error

    monkeypatch.setattr("jaxserve.cli.engine.start", start)
    return cli.run(["generate", "--model", "m", "--prompt", "a"])


def test_errors_of_ours_are_told_from_defects(monkeypatch, capsys):
    assert run_raising(monkeypatch, WeightsError("tensor x\nis missing")) == 2
    assert capsys.readouterr().err == "error: tensor x is missing\n"
    assert run_raising(monkeypatch, EngineDeadError("the engine stopped")) == 1
    assert capsys.readouterr().err == "error: the engine stopped\n"
    assert run_raising(monkeypatch, KeyboardInterrupt()) == 130
    with pytest.raises(ValueError, match="shapes"):  # not raised by our code: its traceback must be seen
        run_raising(monkeypatch, ValueError("shapes do not match"))


def test_a_reader_that_goes_away_ends_us_quietly():
    program = "from jaxserve import cli; import sys; sys.exit(cli.run(['--help']))"
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        result = subprocess.run([sys.executable, "-c", program], stdout=closed, stderr=subprocess.PIPE, check=False)
    assert (result.returncode, result.stderr) == (1, b"")


def test_json_has_null_for_nan_and_people_see_a_dash(capsys):
    show({"a": float("nan"), "b": {"c": [1.0, float("inf")]}}, "t", as_json=True)
    assert capsys.readouterr().out == '{\n  "a": null,\n  "b": {\n    "c": [\n      1.0,\n      null\n    ]\n  }\n}\n'
    assert [readable(v) for v in (float("nan"), None, 1234567, 0.123456, 12345.6, True, "x")] == [
        "-", "-", "1,234,567", "0.1235", "12,346", "True", "x",
    ]  # fmt: skip
