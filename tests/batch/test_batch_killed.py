"""A job that is killed with SIGKILL at random moments, and started again, gives what an undisturbed one gives."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from batch_engine import lines_in, make_engine, without_times

from jaxserve import cli
from jaxserve.cli import engine as driver

ENGINE = {"step_s": 0.01, "max_num_seqs": 16}
SIZES = ("--part-rows", "32", "--window-rows", "64")
CHILD = f"""
import contextlib
from types import SimpleNamespace
from batch_engine import make_engine
from jaxserve.cli import batch, engine, main

batch.PLAIN_INTERVAL_S = 0.1
engine.start = lambda options: contextlib.nullcontext(SimpleNamespace(llm_engine=make_engine(**{ENGINE!r})))
main()
"""


def row(i):
    options = {"custom_id": f"id-{i}", "max_tokens": 1 + i % 12}
    kinds = (
        {"prompt": f"greedy {i}", "temperature": 0},
        {"prompt": f"drawn {i}", "temperature": 1},
        {"prompt": f"seeded {i}", "temperature": 1, "seed": i},
        {"prompt": f"several {i}", "temperature": 1, "n": 3},
        {"messages": [{"role": "user", "content": f"chat {i}"}], "temperature": 0.7},
        {"prompt": f"bad {i}", "temperature": -1},
    )
    return json.dumps({**options, **kinds[i % len(kinds)]})


def killed_after(seconds, command, environment):
    """Starts a run, and kills it so long after its first sign of progress."""
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert b" rows" in process.stderr.readline()
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(("num_rows", "num_kills"), [(400, 1), pytest.param(2000, 5, marks=pytest.mark.full)])
def test_a_killed_job_equals_an_undisturbed_one(num_rows, num_kills, tmp_path, monkeypatch, capsys):
    engine = make_engine(**ENGINE)
    monkeypatch.setattr(driver, "start", lambda options: contextlib.nullcontext(SimpleNamespace(llm_engine=engine)))
    source, whole, target = (str(tmp_path / name) for name in ("in.jsonl", "whole", "out"))
    Path(source).write_text("".join(row(i) + "\n" for i in range(num_rows)))
    arguments = ["batch", source, target, "--model", "demo", "--json", *SIZES]

    assert cli.run(["batch", source, whole, *arguments[3:]]) == 3
    seconds = engine.core.get_metrics()["steps"] * ENGINE["step_s"]  # no run can be faster
    expected = json.loads(capsys.readouterr().out)

    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1]), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", CHILD, *arguments]
    seed = time.time_ns()
    print(f"kills are drawn with seed {seed}; an undisturbed run takes {seconds:.1f} s at least")
    moments = random.Random(seed)
    done = []
    for _ in range(num_kills):
        killed_after(moments.uniform(0, seconds / 6), command, environment)
        done.append(len(lines_in(target)))
    last = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    totals = json.loads(last.stdout)
    print(f"rows done at each kill: {done}")

    assert last.returncode == 3
    assert done == sorted(done)
    assert done[-1] < num_rows
    assert totals["rows_done_before"] == done[-1]
    assert {name: totals[name] for name in ("rows", "failed")} == {name: expected[name] for name in ("rows", "failed")}
    lines = lines_in(target)
    assert [line["custom_id"] for line in lines] == [f"id-{i}" for i in range(num_rows)]
    assert without_times(lines) == without_times(lines_in(whole))
    assert not [name for name in os.listdir(target) if name.startswith(".")]
