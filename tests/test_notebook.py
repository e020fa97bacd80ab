"""The quickstart notebook runs from top to bottom, in a kernel, with the real demo model."""

from pathlib import Path

import nbclient
import nbformat
import pytest

PATH = Path(__file__).parents[1] / "examples" / "quickstart.ipynb"


@pytest.fixture(scope="module")
def notebook():
    return nbformat.read(PATH, as_version=4)


@pytest.fixture(scope="module")
def printed(notebook):
    """What the cells printed, in their order, empty where a cell printed nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PLATFORMS", "cpu")
        done = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": PATH.parent}}).execute()
    cells = [cell for cell in done.cells if cell.cell_type == "code"]
    return ["".join(output.text for output in cell.outputs if output.get("name") == "stdout") for cell in cells]


def test_it_is_stored_without_outputs():
    stored = nbformat.read(PATH, as_version=4)
    assert all(not cell.outputs and cell.execution_count is None for cell in stored.cells if cell.cell_type == "code")


def test_generate_answers_in_the_order_of_the_prompts(printed):
    lines = printed[1].splitlines()
    assert [line.partition(" -> ")[0] for line in lines] == [
        "'The capital of France is'",
        "'The largest planet is'",
        "'The opposite of hot is'",
    ]
    assert "Paris" in lines[0]
    assert all(line.partition(" -> ")[2] != "''" for line in lines)


def test_chat_gives_both_samples(printed):
    assert "Paris" in printed[2]
    assert [line[:2] for line in printed[2].splitlines() if line[:2] in ("0:", "1:")] == ["0:", "1:"]


def test_the_stream_and_the_metrics_come(printed):
    assert len(printed[3].split()) > 10
    assert "first token after" in printed[4]
    assert "jaxserve:generation_tokens" in printed[4]
