"""`jaxserve compile`: the commands of its page, what people see, JSON, what it writes, exit codes."""

import json
import os
import pickle
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve import topologies
from jaxserve.cli import compile as command
from jaxserve.cli.compile import COMPILE_OPTIONS

COMPILERS = Path(sys.prefix) / "ahead-of-time"  # scripts/check installs libtpu there, apart from jax
PAGE = (Path(__file__).parents[2] / "docs" / "tpu.md").read_text(encoding="utf-8")
COMMANDS = [shlex.split(line)[1:] for line in re.findall(r"^    (jaxserve compile .*)$", PAGE, flags=re.MULTILINE)]
LLAMA = ("compile", "--model", "llama-3.1-8b")
needs_libtpu = pytest.mark.skipif(not (COMPILERS / "libtpu").is_dir(), reason=f"libtpu is not in {COMPILERS}")


def run_apart(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """In a process of its own: libtpu reads its environment once."""
    program = "import sys; from jaxserve.cli import main; sys.argv[0] = 'jaxserve'; main()"
    path = os.pathsep.join([str(COMPILERS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "80"}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=folder,
    )


@needs_libtpu
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_the_commands_of_the_page_compile_what_fits(arguments, tmp_path):
    narrow = arguments if "--only" in arguments else [*arguments, "--only", "decode_8"]
    done = run_apart(*narrow, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    if "--json" in arguments:
        found = json.loads(done.stdout)
        assert found["fits"]
        start, decode = found["programs"]
        assert (start["name"], decode["name"]) == ("start_slots_8", "decode_64")
        assert decode["temp_bytes"] < found["weights_bytes"] / 80 / 4  # weights of a layer are read where they are
        flops = 64 * 2 * 68.4e9 / 16  # two a parameter, but for embeddings and the head
        assert flops < decode["flops"] < 1.05 * flops  # some KV heads are copies
        assert decode["vmem_bytes"] > 0
        assert 0 < decode["smem_bytes"] < 64 * 2048 * 4  # page tables are copied row by row
    else:
        assert re.search(r"^decode_8 +[\d.]+ +[\d.]+ +[\d.]+ +[\d,]+ .* yes$", done.stdout, re.MULTILINE)
        assert "All of these compile and fit; with all their code at most " in done.stdout
        assert "neither was what is saved ever loaded on a TPU" in " ".join(done.stdout.split())
        assert max(map(len, done.stdout.splitlines())) <= 80
    if "--save" in arguments:
        manifest = json.loads((tmp_path / "programs" / "manifest.json").read_text(encoding="utf-8"))
        (program,) = manifest["programs"]
        assert (manifest["topology"], manifest["jax_topology"]) == ("v6e-8", "v6e:2x4")
        assert set(manifest["versions"]) == {"jaxserve", "jax", "jaxlib", "libtpu"}
        assert manifest["sizes"]["num_pages"] > 1000
        assert "bfloat16[48,128,1536,2048]" in program["arguments"]  # experts, of all layers and devices
        executable, *_ = pickle.loads((tmp_path / "programs" / program["file"]).read_bytes())
        assert len(executable) > 10_000


@needs_libtpu
def test_what_does_not_fit_is_told_with_the_compilers_reason():
    done = run_apart(*LLAMA, "--topology", "v6e-1", "--num-pages", "4000", "--only", "decode_8")
    assert done.returncode == 3
    assert re.search(r"^decode_8 .* no$", done.stdout, re.MULTILINE)
    assert re.search(r"^decode_8: RESOURCE_EXHAUSTED: .*HBM", done.stdout, re.MULTILINE | re.DOTALL)
    assert "\nNot all of these compile and fit; " in done.stdout


@needs_libtpu
@pytest.mark.parametrize("as_json", [False, True])
def test_weights_that_leave_no_room_do_not_fit(as_json):
    arguments = ("compile", "--model", "llama-3.1-70b", "--topology", "v6e-1")
    done = run_apart(*arguments, *(["--json"] if as_json else []))
    assert (done.returncode, done.stderr) == (3, "")
    text = json.loads(done.stdout)["problem"] if as_json else done.stdout
    assert "no room for a KV pool: 0 bytes are left after " in text


def test_help_shows_every_option_in_full_on_80_columns(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _, _ = run("compile", "--help")
    assert code == 0
    for name in ("topology", "only", "save", "json", *COMPILE_OPTIONS):
        assert f"--{name.replace('_', '-')} " in out
    assert max(map(len, out.splitlines())) <= 80


def test_without_libtpu_it_says_which_one_to_install(run, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, out, err, _ = run(*LLAMA, "--topology", "v6e-8")
    assert (code, out) == (2, "")
    assert re.fullmatch(r'error: .* pip install "libtpu==[\d.]+\*?"\n', err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--topology", "v6e-9"), "topology must be one of h200, "),
        (("--topology", "h200x2"), "topology must be one of TPUs to be compiled for here, got h200x2"),
        (("--topology", "v6e-8", "--tensor-parallel-size", "16"), "needs 16 devices, v6e-8 has 8"),
        (("--topology", "v6e-16", "--tensor-parallel-size", "8"), "up to 4 devices of one host of v6e-16, or all 16"),
        (("--topology", "v6e-8", "--kv-cache-dtype", "fp4"), "kv_cache_dtype must be one of"),
        (("--topology", "v6e-8", "--model", "./nowhere"), "'./nowhere' does not exist"),
    ],
)
def test_a_mistake_is_one_line(run, monkeypatch, arguments, message):
    monkeypatch.setattr(command, "require_libtpu", lambda: None)
    monkeypatch.setattr(topologies, "WITHOUT_TPU", {})  # this process is no one-off
    monkeypatch.setattr(command, "NO_CACHE", {})
    code, out, err, _ = run(*LLAMA, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
