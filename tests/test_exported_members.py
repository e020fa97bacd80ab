"""The public face: every exported name exists, belongs to jaxserve, and costs no jax before it is used."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import jaxserve


@pytest.mark.parametrize("name", jaxserve.__all__)
def test_every_exported_name_exists_and_is_ours(name):
    member = getattr(jaxserve, name)
    assert member.__module__.startswith("jaxserve.")
    assert member.__name__ == name
    assert member.__doc__


def test_type_checkers_see_the_same_names_as_python():
    tree = ast.parse(Path(jaxserve.__file__).read_text(encoding="utf-8"))
    seen = {alias.asname for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen - {None} == set(jaxserve.__all__)


def test_an_unknown_name_is_told_from_the_known():
    with pytest.raises(AttributeError, match=r"no attribute 'Llm'; it exports .*LLM, LLMEngine"):
        jaxserve.Llm  # noqa: B018


def test_dir_lists_what_is_exported():
    assert set(dir(jaxserve)) == {*jaxserve.__all__, "__version__"}


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("jaxserve", ("jax", "numpy")),
        ("jaxserve.scheduler", ("jax", "numpy")),
        ("jaxserve.sampling_params", ("jax", "numpy")),
        ("jaxserve.cli", ("jax", "numpy", "matplotlib", "tokenizers")),
    ],
)
def test_light_modules_import_nothing_heavy(module, heavy):
    program = f"import sys, {module}; found = set({heavy!r}) & set(sys.modules); assert not found, found"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_error_but_built_in_ones_has_one_root():
    exceptions = importlib.import_module("jaxserve.exceptions")
    ours = [value for value in vars(exceptions).values() if isinstance(value, type)]
    assert all(issubclass(error, jaxserve.JaxserveError) for error in ours)
    assert {error.__name__ for error in ours} <= set(jaxserve.__all__)
