"""The Ray Data stage on a local cluster of two replicas, with the demo model."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from ray_processes import command_line, processes

import jaxserve.ray
from jaxserve import LLM, SamplingParams

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]  # Ray's own warnings
OPTIONS = {"max_model_len": 128, "max_num_seqs": 8, "warm_up": "off", "dtype": "float32"}
GREEDY = {"temperature": 0.0, "max_tokens": 8}


def prompt(i: int) -> str:
    return f"The number {i} is"


@pytest.fixture(scope="module")
def expected() -> list[str]:
    with LLM("smollm2-135m", **OPTIONS) as llm:
        outputs = llm.generate([prompt(i) for i in range(40)], SamplingParams(**GREEDY), use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def stage(rows: list[dict], **options):
    dataset = ray.data.from_items(rows, override_num_blocks=20)
    return jaxserve.ray.generate(
        dataset, "smollm2-135m", replicas=2, sampling_params=GREEDY, batch_size=2, **OPTIONS, **options
    )


def test_rows_are_answered_and_bad_ones_say_why(cluster, expected):
    rows = [
        {"id": 0, "prompt": prompt(0), "messages": None, "sampling_params": None},
        {
            "id": 1,
            "prompt": None,
            "messages": [{"role": "user", "content": "Hi"}],
            "sampling_params": {"max_tokens": 2},
        },
        {"id": 2, "prompt": "", "messages": None, "sampling_params": None},
        {"id": 3, "prompt": None, "messages": None, "sampling_params": None},
        {"id": 4, "prompt": prompt(4), "messages": None, "sampling_params": {"top_p": 7.0}},
        {"id": 5, "prompt": prompt(5), "messages": None, "sampling_params": None},
    ]
    dataset = ray.data.from_items(rows, override_num_blocks=1)
    answered = jaxserve.ray.generate(dataset, "smollm2-135m", sampling_params=GREEDY, **OPTIONS).take_all()
    by_id = {row["id"]: row for row in answered}
    assert [by_id[i]["generated_text"] for i in (0, 5)] == [expected[0], expected[5]]
    assert by_id[0]["error"] is None
    assert by_id[0]["finish_reason"] in ("stop", "length")
    assert by_id[1]["error"] is None
    assert len(by_id[1]["generated_tokens"]) == 2
    assert [by_id[i]["generated_text"] for i in (2, 3, 4)] == [None] * 3
    assert "prompt" in by_id[2]["error"]
    assert "either prompt or messages" in by_id[3]["error"]
    assert "top_p" in by_id[4]["error"]
    assert "7.0" in by_id[4]["error"]


def test_a_mistake_in_the_stages_parameters_ends_the_dataset(cluster):
    wrong = {"sampling_params": {"temprature": 1}, **OPTIONS}
    with pytest.raises(Exception, match="did you mean temperature"):
        jaxserve.ray.generate(ray.data.from_items([{"prompt": "a"}]), "smollm2-135m", **wrong).take_all()


@pytest.mark.parametrize("victim", ["replica", "engine"])
def test_no_row_is_lost_when_a_process_is_killed(cluster, expected, victim):
    rows = iter(stage([{"id": i, "prompt": prompt(i)} for i in range(40)]).iter_rows())
    answered = [next(rows)]  # so both replicas are at work
    replicas = [process for process in processes("ray::") if "MapWorker" in command_line(process)]
    assert len(replicas) == 2
    target = replicas[0] if victim == "replica" else replicas[0].children()[-1]
    os.kill(target.pid, signal.SIGKILL)
    answered += rows
    assert sorted(row["id"] for row in answered) == list(range(40))
    assert [row["generated_text"] for row in sorted(answered, key=lambda row: row["id"])] == expected
    assert all(row["error"] is None for row in answered)


def test_the_example_answers_a_file(tmp_path):
    rows = [{"id": i, "prompt": prompt(i)} for i in range(3)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    example = Path(__file__).parents[2] / "examples" / "ray" / "batch.py"
    command = [sys.executable, str(example), str(tmp_path / "in.jsonl"), str(tmp_path / "out"), "--max-tokens", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [line for path in (tmp_path / "out").glob("*.json") for line in path.read_text().splitlines()]
    answers = sorted(map(json.loads, lines), key=lambda row: row["id"])
    assert [answer["id"] for answer in answers] == [0, 1, 2]
    assert all(answer["generated_text"] for answer in answers)
