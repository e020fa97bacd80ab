"""`jaxserve plan`: the commands of its page, what people see, JSON, exit codes."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.cli.plan import PLAN_OPTIONS

PAGE = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
COMMANDS = [shlex.split(line)[1:] for line in re.findall(r"^    (jaxserve plan .*)$", PAGE, flags=re.MULTILINE)]
LLAMA = ("plan", "--model", "llama-3.1-8b")


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_the_commands_of_the_page_find_a_split(run, arguments):
    code, out, err, _ = run(*arguments)
    assert (code, err) == (0, "")
    assert '"best": true' in out if "--json" in arguments else "\nBest: --kv-parallel-size " in out


def test_people_see_every_column_in_full(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _, _ = run(*LLAMA, "--topology", "h200x8", "--context", "120000", "--batch", "16")
    assert code == 0
    assert re.search(r"kv x tp +weights +state +pool +reserve +pages +tokens +fits +TPOT +prefill", out)
    assert "…" not in out
    assert re.search(
        r"^ *2 x 4 +\d\.\d +0\.2 +\d+\.\d +10\.5 +[\d,]+ +[\d,]+ +yes +[\d.]+ +[\d,]+ *$", out, re.MULTILINE
    )
    assert "Collectives were measured between two GPUs" in out


def test_help_shows_every_option_in_full_on_80_columns(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _, _ = run("plan", "--help")
    assert code == 0
    for name in ("topology", "context", "batch", "json", *PLAN_OPTIONS):
        assert f"--{name.replace('_', '-')} " in out
    assert max(map(len, out.splitlines())) <= 80


def test_json_holds_what_was_asked_and_every_split(run):
    code, out, _, _ = run(*LLAMA, "--topology", "v5e-16", "--context", "4096", "--batch", "4", "--json")
    plan = json.loads(out)
    assert code == 0
    assert (plan["model"], plan["topology"], plan["context"], plan["batch"]) == ("llama-3.1-8b", "v5e-16", 4096, 4)
    assert (plan["device"], plan["num_devices"], plan["num_hosts"]) == ("TPU v5e", 16, 4)
    assert len(plan["splits"]) == 1 + 2 + 3 + 5  # not of eight devices, half of the hosts
    (best,) = [split for split in plan["splits"] if split["best"]]
    assert best["fits"]
    assert best["tpot_ms"] == min(split["tpot_ms"] for split in plan["splits"] if split["fits"])
    assert sum(best["tpot_parts_ms"].values()) == pytest.approx(best["tpot_ms"])
    assert plan["ways_out"] == []
    assert any("4 hosts of 4 devices; a split over all 16 takes one process" in note for note in plan["notes"])


@pytest.mark.parametrize(("batch", "said"), [(256, ""), (257, " --max-num-seqs 257")])
def test_a_batch_beyond_the_default_needs_more_slots(run, batch, said):
    arguments = (*LLAMA, "--topology", "h200", "--context", "128", "--batch", str(batch))
    _, out, _, _ = run(*arguments)
    assert f"\nBest: --kv-parallel-size 1 --tensor-parallel-size 1{said}\n" in out
    _, out, _, _ = run(*arguments, "--json")
    assert json.loads(out)["splits"][0]["max_num_seqs"] == batch


def test_where_nothing_fits_it_says_what_would(run):
    arguments = (*LLAMA, "--topology", "v5e-1", "--context", "4096")
    code, out, _, _ = run(*arguments)
    assert code == 3
    assert "Nothing fits. What would:\n- --topology v5e-4\n" in out
    code, out, _, _ = run(*arguments, "--json")
    assert code == 3
    assert json.loads(out)["ways_out"] == ["--topology v5e-4"]


def test_memory_is_what_jax_would_allocate_there(run, monkeypatch):
    def pages(**environment: str) -> int:
        for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        _, out, _, _ = run(*LLAMA, "--topology", "h200", "--context", "128", "--json")
        return json.loads(out)["splits"][0]["num_pages"]

    assert pages() == pages(XLA_PYTHON_CLIENT_MEM_FRACTION="0.75") < pages(XLA_PYTHON_CLIENT_MEM_FRACTION="0.95")
    assert pages(XLA_CLIENT_MEM_FRACTION="0.5") < pages()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--topology", "h300", "--context", "1"), "topology must be one of h200, h200x2, "),
        (("--context", "1"), "Missing option '--topology'"),
        (("--topology", "h200", "--context", "0"), "Invalid value for '--context'"),
        (
            ("--topology", "h200", "--context", "1", "--batch", "9000"),
            "batch must be an integer in [1, 8192], got 9000",
        ),
        (("--topology", "h200", "--context", "900000"), "beyond the model's max_position_embeddings 131072"),
        (("--topology", "h200", "--context", "1", "--kv-cache-dtype", "fp4"), "kv_cache_dtype must be one of"),
        (("--topology", "h200", "--context", "1", "--tensor-parallel-size", "2"), "needs 2 devices, h200 has 1"),
    ],
)
def test_a_mistake_is_one_line(run, arguments, message):
    code, out, err, _ = run(*LLAMA, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_memory_fraction_that_is_none_is_refused(run, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "most")
    code, _, err, _ = run(*LLAMA, "--topology", "h200", "--context", "128")
    assert code == 2
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION must be a number in (0, 1], got 'most'" in err


def test_a_plan_starts_no_device():
    program = """
import sys
from jaxserve import cli
code = cli.run(["plan", "--model", "llama-3.1-8b", "--topology", "h200x2", "--context", "128", "--json"])
from jax._src import xla_bridge
sys.exit(code or int(xla_bridge.backends_are_initialized()))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
