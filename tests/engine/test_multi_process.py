"""Two processes of four CPU devices each are one engine, and end together."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import jax
import pytest
from meshes import EDITED, GREEDY, MODELS, SEEDED, folder_of, start, tokens

from jaxserve import LLM, SamplingParams, multi_process
from jaxserve.config import EngineConfig, ParallelOptions
from jaxserve.exceptions import ParameterError
from jaxserve.sharding.mesh import make_mesh

HERE = Path(__file__).parent
TOO_LONG_S = 120.0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return folder_of(MODELS["dense"], tmp_path_factory.mktemp("models") / "dense")


class Pair:
    """Process 0 and process 1. Both are killed when they take too long. After its end nothing is heard of process 0."""

    def __init__(self, model: str, *options: dict):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        path = os.pathsep.join([str(HERE.parents[1]), str(HERE)])
        answers, out = os.pipe()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        self.processes = [
            subprocess.Popen(
                [sys.executable, HERE / "one_of_several.py", str(i), port, str(fd), model, json.dumps(options[-i])],
                env=os.environ | {"PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # gloo's
                stderr=subprocess.PIPE,
                text=True,
                pass_fds=(fd,),
            )
            for i, fd in enumerate((out, nowhere))
        ]
        for fd in (out, nowhere):
            os.close(fd)
        self._answers = os.fdopen(answers)
        self._watch = threading.Timer(TOO_LONG_S, self.kill)
        self._watch.start()

    def kill(self):
        for process in self.processes:
            process.kill()

    def hear(self) -> str:
        return self._answers.readline().strip()

    def ask(self, params: str) -> str:
        assert self.processes[0].stdin is not None
        print(params, file=self.processes[0].stdin, flush=True)
        return self.hear()

    def end_of(self, i: int) -> tuple[int, str]:
        """Exit code and stderr of a process, when it has ended."""
        _, err = self.processes[i].communicate()
        return self.processes[i].returncode, err

    def close(self):
        self._watch.cancel()
        self.kill()
        for process in self.processes:
            process.communicate()
        self._answers.close()


@pytest.fixture
def pair_of(model):
    pairs = []

    def of(*options: dict) -> Pair:
        pairs.append(Pair(model, *(options or ({},))))
        return pairs[-1]

    yield of
    for pair in pairs:
        pair.close()


def test_tokens_are_those_of_one_device_and_a_silent_process_ends_the_engine(pair_of, model):
    pair = pair_of()
    llm = start(model)
    assert pair.hear() == "ready"
    for name, params in (("greedy", GREEDY), ("seeded", SEEDED)):
        assert json.loads(pair.ask(name)) == tokens(llm, params)
    llm.close()
    os.kill(pair.processes[1].pid, signal.SIGSTOP)  # it neither answers nor ends: a hang, or a lost network
    cut_off = ""  # where a call waits for the device, as in older JAX
    assert pair.ask("greedy") in ("process 1 has been silent for 4 s", cut_off)
    code, err = pair.end_of(0)
    assert code != 0
    assert "jaxserve: process 1 has been silent for 4 s" in err


@pytest.mark.full
@pytest.mark.parametrize(
    "options", [{"prefill": "layered", "warm_up": "blocking"}, {"async_scheduling": False, "num_pages": 42}], ids=str
)
def test_several_processes_compose_with(pair_of, model, options):
    pair = pair_of(options)
    llm = start(model)
    assert pair.hear() == "ready"
    for name, params in (("greedy", GREEDY), ("edited", EDITED), ("greedy", GREEDY)):
        assert json.loads(pair.ask(name)) == tokens(llm, params)
    llm.close()
    assert pair.end_of(0)[0] == 0, "process 0 ends with its input"
    assert pair.end_of(1)[0] == 0


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_process_ends_the_engine_with_its_name(pair_of, number):
    pair = pair_of()
    assert pair.hear() == "ready"
    pair.processes[1].send_signal(number)
    assert pair.end_of(1)[0] == -number
    assert pair.ask("greedy").startswith("process 1 is gone: ")
    code, err = pair.end_of(0)
    assert code != 0
    assert "EngineDeadError: process 1 is gone: " in err


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "told"), [(signal.SIGKILL, "is gone: "), (signal.SIGSTOP, "has been silent for 4 s")]
)
def test_the_end_of_process_0_ends_the_others(pair_of, number, told):
    pair = pair_of()
    assert pair.hear() == "ready"
    os.kill(pair.processes[0].pid, number)
    code, err = pair.end_of(1)
    assert code != 0
    assert f"jaxserve: process 0 {told}" in err


@pytest.mark.full
def test_processes_that_were_started_otherwise_are_told_how(pair_of):
    pair = pair_of({}, {"seed": 5})
    assert pair.hear() == ""
    code, err = pair.end_of(1)
    assert code != 0
    assert "ValueError: all processes must be started alike, but on this one seed is 5, not 0" in err
    code, err = pair.end_of(0)
    assert code != 0
    assert "process 1 has ended: ValueError: all processes must be started alike" in err


@pytest.mark.full
def test_the_commands_of_the_documentation_serve_and_end_together(tiny_model):
    lines = (HERE.parents[1] / "docs" / "mesh.md").read_text(encoding="utf-8").splitlines()
    commands = [shlex.split(line) for line in lines if "--process-id" in line]
    with socket.socket() as probe, LLM(tiny_model, dtype="float32", max_model_len=64, warm_up="off") as llm:
        probe.bind(("127.0.0.1", 0))
        want = llm.generate("The quick", SamplingParams(temperature=0.0, max_tokens=9), use_tqdm=False)[0]
        places = {"smollm2-135m": tiny_model, "127.0.0.1:9911": f"127.0.0.1:{probe.getsockname()[1]}"}
    processes = []
    for variable, _, *arguments in commands:
        name, _, value = variable.partition("=")
        given = [places.get(argument, argument) for argument in arguments]
        small = ["--dtype", "float32", "--max-model-len", "64", "--warm-up", "off", "--port", "0"]
        command = [sys.executable, "-c", "from jaxserve import cli; cli.main()", *given, *small]
        environment = os.environ | {name: value, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(HERE.parents[1])}
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
    watch = threading.Timer(TOO_LONG_S, lambda: [process.kill() for process in processes])
    watch.start()
    said = ""
    while "\nready\n" not in said and (line := processes[0].stdout.readline()):
        said += line
    port = re.search(r"127\.0\.0\.1:(\d+), loading", said)[1]
    body = {"model": tiny_model, "prompt": "The quick", "temperature": 0, "max_tokens": 9}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["text"] == want.outputs[0].text
    form = {"temperature": 1.0, "structured_outputs": {"regex": "[0-9]{5}"}}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body | form, timeout=60).json()
    assert re.fullmatch("[0-9]{5}", answer["choices"][0]["text"]), "masks reach all processes"
    processes[0].terminate()
    outputs = [process.communicate()[0] for process in processes]
    watch.cancel()
    assert [process.returncode for process in processes] == [0, 0], outputs


@pytest.mark.full
def test_a_batch_over_two_processes_is_one_shard(tiny_model, tmp_path):
    rows = [{"custom_id": str(i), "prompt": "The quick", "max_tokens": 3} for i in range(3)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-c", "from jaxserve import cli; cli.main()", "batch", "in.jsonl", "out.jsonl"]
    command += ["--model", tiny_model, "--dtype", "float32", "--max-model-len", "64", "--tensor-parallel-size", "2"]
    command += ["--coordinator-address", address, "--num-processes", "2", "--process-id"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(HERE.parents[1])}
    processes = [subprocess.Popen([*command, str(i)], env=environment, cwd=tmp_path) for i in range(2)]
    watch = threading.Timer(TOO_LONG_S, lambda: [process.kill() for process in processes])
    watch.start()
    assert [process.wait() for process in processes] == [0, 0]
    watch.cancel()
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [answer["custom_id"] for answer in answers] == ["0", "1", "2"]


def test_what_several_processes_cannot_be_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multi_process, "_met", [True])
    with pytest.raises(ValueError, match="several processes make one engine once; start them all again"):
        multi_process.join(ParallelOptions())
    with pytest.raises(
        ValueError, match=r"1 x tensor_parallel_size 4 must be the number of devices of all 2 .*, 8, got 4"
    ):
        make_mesh(1, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({"coordinator_address": address}, "coordinator_address must be None, auto, or host:port of process 0, got")
            for address in ("here", "a:0", "a:99999", "[::1:9911", "http://x:80", "\u00e9:80", "::1:80", 80)
        ),
        ({"coordinator_address": "a:1"}, "coordinator_address must be given with num_processes and process_id"),
        ({"num_processes": 2}, "num_processes must be left out without a coordinator_address host:port, got 2"),
        (
            {"coordinator_address": "a:1", "num_processes": 2, "process_id": 2},
            "process_id must be None or at most 1, got 2",
        ),
    ],
    ids=str,
)
def test_places_that_cannot_be_are_refused(options, message):
    with pytest.raises(ParameterError, match=message):
        EngineConfig.of("model", **options)
