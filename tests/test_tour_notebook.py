"""The tour of the scheduler runs from top to bottom, in a kernel, with the real demo model."""

from pathlib import Path

import nbclient
import nbformat
import pytest

PATH = Path(__file__).parents[1] / "examples" / "scheduler_tour.ipynb"


def test_it_is_stored_without_outputs():
    stored = nbformat.read(PATH, as_version=4)
    assert all(not cell.outputs and cell.execution_count is None for cell in stored.cells if cell.cell_type == "code")


@pytest.mark.full
def test_it_draws_its_own_steps(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    notebook = nbformat.read(PATH, as_version=4)
    done = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": PATH.parent}}).execute()
    outputs = [output for cell in done.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(output.text for output in outputs if output.get("name") == "stdout")
    shown = [output.data for output in outputs if "data" in output]
    assert printed.startswith("9 requests in ")
    assert sum("image/png" in data for data in shown) == 1
    assert any("24 tokens" in data.get("text/html", "") for data in shown)
    computed, asked = (int(line.rsplit(" ", 1)[1]) for line in printed.splitlines()[-2:])
    assert computed == asked > 300
