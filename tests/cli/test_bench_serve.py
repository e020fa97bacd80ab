import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest
from fakes import FakeEngine, FakeLLM

from jaxserve import RequestOutputKind, SamplingParams
from jaxserve.cli import engine as driver
from jaxserve.cli.bench.plot import require_drawable
from jaxserve.cli.bench.serve import TimedRequest, drive
from jaxserve.exceptions import RequestError


@dataclasses.dataclass
class Clock:
    """Time that passes only in steps (0.1 s each) and in sleep."""

    time: float = 100.0
    slept: float = 0.0

    def now(self) -> float:
        return self.time

    def step(self) -> None:
        self.time += 0.1

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.time += seconds


def request(num_tokens: int, prompt: tuple[int, ...] = (5, 6)) -> TimedRequest:
    params = SamplingParams(max_tokens=num_tokens, output_kind=RequestOutputKind.DELTA)
    return TimedRequest(prompt_token_ids=list(prompt), params=params)


def drive_with(requests, arrivals, **options):
    clock = Clock()
    engine = FakeEngine(on_step=clock.step, now=clock.now)
    return drive(engine, requests, arrivals, now=clock.now, sleep=clock.sleep, **options), engine, clock


def test_a_request_that_arrives_during_a_step_counts_its_wait():
    run, _, _ = drive_with([request(2), request(1)], [0.0, 0.05])
    first, second = run.records
    assert first.token_times_s == pytest.approx((0.1, 0.2))
    assert second.token_times_s == pytest.approx((0.2,))
    assert second.ttft_s == pytest.approx(0.15)  # 0.1 if it were measured from when the engine took it


def test_an_idle_engine_sleeps_until_the_next_arrival():
    run, _, clock = drive_with([request(1), request(1)], [0.0, 1.0])
    assert clock.slept == pytest.approx(0.9)
    assert run.duration_s == pytest.approx(1.1)
    assert [step.num_requests_running for step in run.steps] == [1, 1]


def test_steps_of_an_earlier_run_do_not_count():
    clock = Clock()
    engine = FakeEngine(on_step=clock.step, now=clock.now)
    for num_tokens in (3, 2):
        run = drive(engine, [request(num_tokens)], [0.0], now=clock.now, sleep=clock.sleep)
    assert [step.step for step in run.steps] == [4, 5]
    assert run.steps[0].start_time == pytest.approx(run.start_time)


def test_max_concurrency_holds_requests_back():
    run, engine, _ = drive_with([request(2)] * 5, [0.0] * 5, max_concurrency=2)
    assert engine.most_running == 2
    assert run.records[-1].ttft_s == pytest.approx(0.5)
    assert sum(step.num_new_tokens for step in run.steps) == 10


def test_a_refused_request_has_failed_and_the_others_go_on():
    run, _, _ = drive_with([request(1), request(1, prompt=())], [0.0, 0.0])
    assert [record.failed for record in run.records] == [False, True]


def test_each_request_is_counted_as_it_ends():
    times = []
    clock = Clock()
    requests = [request(1), request(3), request(1, prompt=())]
    drive(
        FakeEngine(on_step=clock.step, now=clock.now),
        requests,
        [0.0, 0.0, 0.05],
        now=clock.now,
        sleep=clock.sleep,
        on_end=lambda: times.append(clock.time - 100.0),
    )
    assert times == pytest.approx([0.1, 0.1, 0.3])


@pytest.mark.parametrize(
    ("command", "end"),
    [
        (("serve", "--num-prompts", "3", "--random-output-len", "2", "--num-warmups", "2"), "requests 3/3"),
        (("latency", "--num-iters", "3", "--output-len", "2"), "batches 5/5"),
    ],
)
def test_a_terminal_sees_how_far_a_benchmark_is(run, monkeypatch, command, end):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    code, _, err, _ = run("bench", command[0], "--model", "m", *command[1:])
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|[━╸╺\r\n]", "", err)
    assert code == 0
    assert "loading the model and compiling" in text
    assert end in re.sub(" +", " ", text)


def test_a_file_in_place_of_the_terminal_gets_no_progress(run):
    for command in ("serve", "latency", "throughput"):
        assert run("bench", command, "--model", "m")[2] == ""


def test_a_run_in_which_everything_fails_ends():
    run, _, _ = drive_with([request(1, prompt=())] * 2, [0.0, 0.2])
    assert [record.failed for record in run.records] == [True, True]


def test_serve_reports_the_fields_of_vllm(run, tmp_path):
    file = tmp_path / "result.json"
    options = ("--num-prompts", "4", "--random-input-len", "6", "--random-output-len", "3", "--request-rate", "1000")
    limits = ("--goodput", "ttft:1000", "tpot:1000")
    code, out, _, llm = run("bench", "serve", "--model", "m", *options, *limits, "--json", "--output-json", str(file))
    result = json.loads(out)
    assert code == 0
    assert json.loads(file.read_text()) == result
    assert (result["completed"], result["failed"]) == (4, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (24, 12)
    assert result["goodput_attainment"] == 1.0
    assert result["expert_bytes_per_request"] == 5 * 3  # the fake counts five bytes a token
    assert 5 <= result["expert_bytes_per_step"] <= 5 * 4
    assert {
        f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl", "e2el")
    } <= set(result)
    assert llm.options == {"model": "m", "warm_up": "blocking", "prioritize_prefill": False}


def test_serve_prints_a_table_for_people_and_draws(run, tmp_path):
    picture = tmp_path / "out.png"
    options = ("--num-prompts", "2", "--random-input-len", "4", "--random-output-len", "2")
    code, out, _, _ = run("bench", "serve", "--model", "m", *options, "--plot", str(picture))
    assert code == 0
    assert "request_throughput" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_bad_goodput_limit_stops_before_the_model_loads(run):
    code, _, err, llm = run("bench", "serve", "--model", "m", "--goodput", "ttft:200", "speed:1")
    assert code == 2
    assert "error: goodput must be NAME:MS" in err
    assert llm is None


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--seed", "-1", "--seed must be at least 0, got -1"),
        ("--num-prompts", "-1", "num_prompts must be at least 1, got -1"),
        *[("--metric-percentiles", text, "must be numbers in [0, 100]") for text in ("200", "abc", "nan", "-5", "")],
        ("--plot", "x.zzz", "--plot must end in one of "),
        ("--plot", "/none/x.png", "No such file or directory: /none/x.png"),
        ("--output-json", "/none/x.json", "No such file or directory: /none/x.json"),
    ],
)
def test_what_cannot_be_measured_or_written_stops_before_the_model_loads(run, option, value, message):
    code, _, err, llm = run("bench", "serve", "--model", "m", option, value)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
    assert llm is None


def test_without_matplotlib_the_command_says_what_to_install(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err, _ = run("bench", "serve", "--model", "m", "--plot", "x.png")
    assert code == 2
    assert 'pip install "jaxserve[plot]", or in a checkout: .venv/bin/pip install -e ".[plot]"' in err


def test_a_look_at_the_files_to_write_leaves_them_as_they_were(tmp_path):
    old, new = tmp_path / "old.png", tmp_path / "new.png"
    old.write_text("old")
    for file in (old, new):
        require_drawable(file)
    assert old.read_text() == "old"
    assert not new.exists()


def test_a_run_in_which_every_request_failed_is_no_success(run, monkeypatch):
    def refuse(*_):
        raise RequestError("prompt has 9 tokens, max_model_len is 8")

    monkeypatch.setattr(FakeEngine, "add_request", refuse)
    code, out, err, _ = run("bench", "serve", "--model", "m", "--num-prompts", "3", "--json")
    assert (code, json.loads(out)["failed"]) == (1, 3)
    assert err == "error: all 3 requests failed, the first because prompt has 9 tokens, max_model_len is 8\n"


def test_throughput_counts_all_tokens(run):
    options = ("--num-prompts", "3", "--random-input-len", "5", "--random-output-len", "2", "--json")
    code, out, _, _ = run("bench", "throughput", "--model", "m", *options)
    result = json.loads(out)
    assert code == 0
    assert (result["num_requests"], result["total_num_tokens"]) == (3, 21)
    assert result["tokens_per_second"] == pytest.approx(21 / result["elapsed_time"])


def test_latency_leaves_the_warm_up_out(run):
    options = ("--num-iters", "3", "--num-iters-warmup", "2", "--batch-size", "2", "--output-len", "2", "--json")
    code, out, _, _ = run("bench", "latency", "--model", "m", *options)
    result = json.loads(out)
    assert code == 0
    assert len(result["latencies"]) == 3
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 3)
    assert set(result["percentiles"]) == {"10", "25", "50", "75", "90", "99"}


@pytest.mark.parametrize(
    ("command", "num_warm"),
    [
        (("serve", "--num-prompts", "2", "--random-output-len", "3", "--num-warmups", "1"), 3),
        (("throughput", "--num-prompts", "2", "--random-output-len", "3", "--num-warmups", "1"), 3),
        (("latency", "--num-iters", "2", "--num-iters-warmup", "1", "--batch-size", "2", "--output-len", "3"), 3),
    ],
)
def test_a_profile_holds_the_measured_steps_and_no_others(run, tmp_path, command, num_warm):
    code, _, _, llm = run("bench", command[0], "--model", "m", *command[1:], "--profile", str(tmp_path / "trace"))
    assert code == 0
    assert llm.profile == [str(tmp_path / "trace"), num_warm, len(llm.llm_engine.steps)]


def test_a_profile_ends_when_its_run_fails(tmp_path):
    llm = FakeLLM()
    with pytest.raises(ZeroDivisionError), driver.profiled(llm, tmp_path):
        raise ZeroDivisionError
    assert llm.profile == [str(tmp_path), 0, 0]


def test_a_profile_into_a_file_is_refused_before_the_model_loads(run, tmp_path):
    file = tmp_path / "file"
    file.touch()
    code, _, err, llm = run("bench", "throughput", "--model", "m", "--profile", str(file))
    assert (code, llm) == (2, None)
    assert f"--profile': dir '{file}' is a file" in err


def test_the_documented_profile_command_runs(run, tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "observability.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^jaxserve (bench serve .*)$", page, re.MULTILINE)
    code, _, _, llm = run(*line.replace("/tmp/profile", str(tmp_path)).split(), "--random-input-len", "4")
    assert code == 0
    assert llm.profile[0] == str(tmp_path)
