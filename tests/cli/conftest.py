import pytest
from fakes import FakeLLM

from jaxserve import cli
from jaxserve.cli import engine as driver


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a command line against a fake engine: `run("generate", ...)` -> (exit code, stdout, stderr, the LLM)."""
    made: list[FakeLLM] = []

    def start(options) -> FakeLLM:
        made.append(FakeLLM(**options))
        return made[-1]

    def command(*arguments: str):
        monkeypatch.setattr(driver, "start", start)
        code = cli.run(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err, made[-1] if made else None

    return command
