"""Without options for shards, each of JAX's processes takes its share."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from batch_engine import lines_in

CHILD = """
import contextlib, sys
from types import SimpleNamespace
import jax
from batch_engine import make_engine
from jaxserve.cli import engine, run

address, index, *arguments = sys.argv[1:]
jax.distributed.initialize(address, num_processes=2, process_id=int(index))
engine.start = lambda options: contextlib.nullcontext(SimpleNamespace(llm_engine=make_engine()))
code = run(arguments)
jax.distributed.shutdown()
sys.exit(code)
"""


@pytest.mark.full
def test_jax_processes_do_every_row_once(tmp_path):
    source, target = tmp_path / "in.jsonl", str(tmp_path / "out")
    source.write_text("".join(f'{{"custom_id": "{i}", "prompt": "{i}"}}\n' for i in range(30)))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1]), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    arguments = ["batch", str(source), target, "--model", "demo", "--part-rows", "4", "--json"]
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, address, str(index), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    results = [run.communicate() for run in runs]
    assert [run.returncode for run in runs] == [0, 0], results
    assert [json.loads(out)["rows"] for out, _ in results] == [16, 14]
    assert [line["custom_id"] for line in lines_in(target)] == [str(i) for i in range(30)]
    assert json.loads(Path(target, "manifest.json").read_text())["num_shards"] == 2
