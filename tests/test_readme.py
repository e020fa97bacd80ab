"""What the README shows is true."""

import functools
import re
import shlex
import tomllib
from pathlib import Path

import pytest

import jaxserve
from jaxserve import EngineDeadError, cli
from jaxserve.batch import Row, parse_row

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_library_example_runs(monkeypatch, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    # Compiles only what the example needs, which changes no answer.
    monkeypatch.setattr(jaxserve, "LLM", functools.partial(jaxserve.LLM, warm_up="off"), raising=False)
    exec(compile(example, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "The capital of France is -> " in printed
    assert "red" in printed.lower()
    assert len(printed.splitlines()) >= 3 + 1 + 1


def command_lines():
    blocks = "".join(re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL)).replace("\\\n", "")
    lines = [line for line in blocks.splitlines() if line.startswith("jaxserve ") and "|" not in line]
    return [shlex.split(line, comments=True)[1:] for line in lines]


@pytest.mark.parametrize("arguments", command_lines(), ids=" ".join)
def test_the_commands_reach_the_engine_as_they_are_shown(arguments, monkeypatch, tmp_path, capsys):
    def start(options):
        raise EngineDeadError("as far as the engine")

    monkeypatch.setattr("jaxserve.cli.engine.start", start)
    monkeypatch.setattr("jaxserve.cli.engine.start_async", start)
    monkeypatch.chdir(tmp_path)
    (line,) = re.findall(r"`(\{.*?\})`", README)
    Path("in.jsonl").write_text(line + "\n", encoding="utf-8")
    ports = {i + 1 for i, argument in enumerate(arguments) if argument == "--port"}  # the one shown may be taken
    assert cli.run(["0" if i in ports else argument for i, argument in enumerate(arguments)]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "error: as far as the engine"


def test_the_line_of_a_batch_file_is_a_row():
    (line,) = re.findall(r"`(\{.*?\})`", README)
    assert isinstance(parse_row((0, line.encode())), Row)


def test_the_extras_named_are_those_that_exist():
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for names in re.findall(r'-e "\.\[(.*?)\]"', README):
        assert set(names.split(",")) <= set(known)


def test_the_library_example_is_short():
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len([line for line in example.splitlines() if line.strip()]) <= 20


def test_local_links_lead_somewhere():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page}: {target}"


def test_files_named_in_the_tour_exist():
    tour = (ROOT / "docs" / "life_of_a_request.md").read_text(encoding="utf-8")
    folders = ("", "jaxserve", "layers", "scheduler", "docs")
    for name in re.findall(r"`([\w/]+\.(?:py|md))(?::\w+)?`", tour):
        assert any((ROOT / folder / name).exists() for folder in folders), name
