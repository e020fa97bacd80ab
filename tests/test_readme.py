"""What the README shows is true."""

import functools
import re
from pathlib import Path

import jaxserve

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
    assert len(printed.splitlines()) >= 3 + 1 + 8


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
