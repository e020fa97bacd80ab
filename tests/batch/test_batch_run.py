"""Whole jobs over a fast engine: every row once, in order, whatever stops them."""

import json
import os
from pathlib import Path

import fsspec
import pytest
from batch_engine import make_engine, without_times

from jaxserve.batch import Source
from jaxserve.exceptions import EngineDeadError, QueueFullError


def rows_of(count, **options):
    return [{"custom_id": f"id-{i}", "prompt": f"{i}|", "max_tokens": 1 + i % 5, **options} for i in range(count)]


def texts(lines):
    return [line["response"]["body"]["choices"][0]["text"] for line in lines]


def test_answers_stand_in_the_order_of_the_rows_in_numbered_parts(job):
    rows = rows_of(10, temperature=0)
    totals = job.run(rows)
    assert [line["custom_id"] for line in job.lines()] == [row["custom_id"] for row in rows]
    assert texts(job.lines()) == [(row["prompt"] * 5)[: row["max_tokens"]] for row in rows]
    assert sorted(os.listdir(job.target)) == ["manifest.json", *(f"part-00000-00000{i}.jsonl" for i in range(3))]
    assert (totals.num_rows, totals.done, totals.failed, totals.done_before) == (10, 10, 0, 0)
    assert (totals.prompt_tokens, totals.generated_tokens) == (20, 30)


def test_bad_rows_of_every_kind_stop_no_other(job):
    good = {"prompt": "good", "temperature": 0, "max_tokens": 4}
    bad = {
        "{": "invalid_json",
        '{"custom_id": "\\ud800", "prompt": ""}': "invalid_request",
        '{"prompt": "a", "\\ud800": 1}': "invalid_request",
        "[" * 100_000: "invalid_json",
        '{"prompt": "a", "extra_args": ' + '{"a":' * 5000 + "1" + "}" * 5001: "invalid_json",
        '{"prompt": "a", "temprature": 1}': "invalid_request",
        '{"messages": [{"content": "a"}]}': "invalid_request",
        '{"prompt": "refuse"}': "invalid_request",
        '{"prompt": [99999]}': "invalid_request",
        json.dumps({"messages": [{"role": "user", "content": "a" * 5000}]}): "invalid_request",
        json.dumps({"prompt": "a" * 5000}): "invalid_request",
        '{"prompt": "a", "flat_logprobs": true}': "not_supported",
        '{"prompt": "a", "structured_outputs": {"regex": "("}}': "invalid_request",
        '{"custom_id": "first", "prompt": "a"}': "duplicate_custom_id",
    }
    rows = [{**good, "custom_id": "first"}, *(row for entry in bad for row in (entry, "", good))]
    totals = job.run(rows)
    lines = job.lines()
    assert [line["error"] is None for line in lines] == [True, *[False, True] * len(bad)]
    assert [line["error"]["code"] for line in lines[1::2]] == list(bad.values())
    assert all((line["response"] is None) == (line["error"] is not None) for line in lines)
    assert set(texts(lines[::2])) == {"good"}
    assert (totals.done, totals.failed) == (2 * len(bad) + 1, len(bad))
    assert totals.first_failure.startswith("row-1: the row is not JSON: ")
    messages = [line["error"]["message"] for line in lines[1::2]]
    assert "refused, as planted" in messages[7]
    assert "the prompt has 5000 tokens, but max_model_len is 4096" in messages[9]
    assert "the prompt has 5000 characters, more than 4095 tokens" in messages[10]


def test_a_chat_goes_through_the_template(job):
    totals = job.run([{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "temperature": 0}])
    (line,) = job.lines()
    assert totals.failed == 0
    assert line["response"]["body"]["choices"][0]["message"] == {"role": "assistant", "content": "hi"}


def test_a_row_that_the_engine_gives_up_is_an_error_and_no_answer(job):
    step = job.engine.step

    def gives_up():
        outputs = step()
        for output in outputs:
            if output.finished and output.request_id == "batch-1":
                sample = output.outputs[1]
                sample.finish_reason, sample.stop_reason = "error", "no token is left, as planted"
        return outputs

    job.engine.step = gives_up
    totals = job.run(rows_of(3, n=2, temperature=1))
    assert (totals.done, totals.failed) == (3, 1)
    assert totals.first_failure == "id-1: no token is left, as planted"
    assert [line["error"] is None for line in job.lines()] == [True, False, True]
    assert job.lines()[1]["error"] == {"code": "generation_failed", "message": "no token is left, as planted"}


def test_n_samples_stand_in_one_line(job):
    job.run(rows_of(3, n=3, temperature=1))
    assert [[choice["index"] for choice in line["response"]["body"]["choices"]] for line in job.lines()] == [
        [0, 1, 2]
    ] * 3


@pytest.mark.parametrize("num_shards", [2, 3, 7])
def test_shards_do_every_row_once(job, num_shards):
    rows = rows_of(22)
    job.run(rows)
    whole = without_times(job.lines())
    job.target += "-sharded"
    totals = [job.run(shard=shard, num_shards=num_shards) for shard in reversed(range(num_shards))]
    assert without_times(job.lines()) == whole
    assert [line["custom_id"] for line in whole] == [row["custom_id"] for row in rows]
    assert sum(shard.done for shard in totals) == 22
    assert {name[:10] for name in os.listdir(job.target) if name.startswith("part")} == {
        f"part-{shard:05}" for shard in range(min(num_shards, 6))
    }


def test_another_file_system_takes_input_and_output(job):
    memory = fsspec.filesystem("memory")
    job.run(rows_of(9))
    whole = without_times(job.lines())
    memory.pipe_file("/batch-run/in/a.jsonl", Path(job.source).read_bytes())
    job.source, job.target = "memory://batch-run/in", "memory://batch-run/out"
    job.run()
    assert without_times(job.lines()) == whole
    assert job.run().done_before == 9
    memory.store.clear()


def test_a_resumed_job_does_the_missing_parts_alone_and_gives_the_same(job):
    job.run(rows_of(22))
    whole = without_times(job.lines())
    os.remove(f"{job.target}/part-00000-000001.jsonl")
    os.remove(f"{job.target}/part-00000-000004.jsonl")
    kept = os.stat(f"{job.target}/part-00000-000000.jsonl")
    job.engine.core.prompts.clear()
    totals = job.run()
    assert without_times(job.lines()) == whole
    assert sorted(job.engine.core.prompts) == sorted(f"{i}|" for i in (*range(4, 8), *range(16, 20)))
    assert (totals.done_before, totals.done, totals.generated_tokens) == (14, 22, 25)
    assert os.stat(f"{job.target}/part-00000-000000.jsonl") == kept


def test_failures_of_earlier_runs_are_counted(job):
    job.run(["{", *rows_of(7)])
    os.remove(f"{job.target}/part-00000-000001.jsonl")
    totals = job.run()
    assert (totals.done_before, totals.failed, totals.first_failure) == (4, 1, None)


def test_a_part_that_lost_rows_is_told(job):
    job.run(rows_of(8))
    path = f"{job.target}/part-00000-000001.jsonl"
    with open(path, "rb") as file:
        lines = file.readlines()
    with open(path, "wb") as file:
        file.writelines(lines[:3])
    with pytest.raises(ValueError, match="should hold 4 rows, and has 3: delete it, and run again"):
        job.run()


def test_what_is_sampled_depends_on_the_seed_and_the_row_alone(job):
    rows = [{"prompt": "same", "max_tokens": 8}] * 12
    job.run(rows, window_rows=4)
    first = texts(job.lines())
    assert len(set(first)) == 12
    job.target += "-2"
    job.engine = make_engine(max_num_seqs=1)
    job.run(window_rows=12)
    assert texts(job.lines()) == first
    job.target += "-3"
    job.run(seed=1)
    assert not set(texts(job.lines())) & set(first)


def test_the_engine_is_kept_full_within_its_bounds(job):
    job.run(rows_of(200))
    assert job.engine.core.most_running == 16  # as many wait as run
    job.engine, job.target = make_engine(), job.target + "-n"
    job.run(rows_of(20, n=6, temperature=1))
    assert job.engine.core.most_running == 12
    job.engine, job.target = make_engine(), job.target + "-large-n"
    job.run(rows_of(2, n=40, temperature=1))  # larger than the bound: alone
    assert job.engine.core.most_running == 40


def test_a_full_queue_makes_rows_wait(job):
    core = job.engine.core
    add = core.add_request

    def add_request(request):
        if len(core._running) >= 3:
            raise QueueFullError("the queue is full")
        add(request)

    core.add_request = add_request
    assert job.run(rows_of(20)).failed == 0
    assert core.most_running == 3


def test_three_windows_and_the_read_ahead_are_in_memory_at_most(job, monkeypatch):
    rows = rows_of(64, temperature=0)
    rows[0]["max_tokens"] = 500  # holds the first window open
    read = []
    real = Source.read
    monkeypatch.setattr(Source, "read", lambda self, part: read.append(part) or real(self, part))
    ahead = []
    job.run(rows, window_rows=8, on_progress=lambda totals: ahead.append((totals.done, max(read))))
    stuck = [part for done, part in ahead if done == 15]  # all of both windows but the one long row
    assert stuck
    assert max(stuck) <= 3 + 2 + 4  # two windows of two parts, a window in Grain's hands, and its read-ahead
    assert [line["custom_id"] for line in job.lines()] == [row["custom_id"] for row in rows]


def test_a_part_is_written_while_others_run(job):
    rows = rows_of(8, temperature=0)
    rows[7]["max_tokens"] = 300
    seen = []
    job.run(rows, on_progress=lambda totals: seen.append(os.path.exists(f"{job.target}/part-00000-000000.jsonl")))
    assert seen.index(True) < len(seen) // 2


def test_prompts_that_begin_alike_run_together(job):
    prompts = [letter * 100 + str(i) for i in range(6) for letter in "ab"]
    job.run([{"prompt": prompt, "max_tokens": 2} for prompt in prompts], part_rows=20)
    assert [prompt[0] for prompt in job.engine.core.prompts] == ["a"] * 6 + ["b"] * 6


def test_a_dead_engine_ends_the_job_and_the_next_run_goes_on(job):
    steps = []

    def die():
        steps.append(1)
        if len(steps) == 8:
            raise EngineDeadError("a step failed")
        return step()

    step, job.engine.step = job.engine.step, die
    with pytest.raises(EngineDeadError):
        job.run(rows_of(40), window_rows=4)
    done = len(job.lines())
    assert 0 < done < 40
    job.engine = make_engine()
    assert job.run().done_before == done
    assert len(job.lines()) == 40


def test_an_interrupted_run_leaves_no_request_behind(job):
    def interrupt(totals):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.run(rows_of(30, max_tokens=9), on_progress=interrupt)
    assert job.engine.get_num_unfinished_requests() == 0
    assert not job.engine.core.has_unfinished()


def test_a_part_that_cannot_be_written_stops_the_job_and_the_next_run_goes_on(job, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda *_: None if not os.listdir(job.target)[1:] else full())
        with pytest.raises(OSError, match="No space left on device"):
            job.run(rows_of(12))
    assert os.listdir(job.target) == ["manifest.json"]
    assert job.engine.get_num_unfinished_requests() == 0
    assert job.run().done == 12


def test_an_input_without_rows_is_done_at_once(job):
    totals = job.run(["", " "])
    assert (totals.num_rows, totals.done) == (0, 0)
    assert os.listdir(job.target) == ["manifest.json"]
