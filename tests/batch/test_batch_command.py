"""`jaxserve batch` as it is typed: folders and single files, shards, progress, totals, exit codes."""

import contextlib
import json
import os
import pty
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from batch_engine import make_engine
from fsspec.implementations.local import LocalFileSystem

from jaxserve import cli
from jaxserve.batch import Totals
from jaxserve.cli import batch as command_module, engine as driver

ROWS = '{"custom_id": "a", "prompt": "abc", "max_tokens": 3, "temperature": 0}\n{"custom_id": "b", "prompt": 7}\n'


@pytest.fixture
def starts(monkeypatch):
    """Engines that were started."""
    made = []

    def start(options):
        engine = make_engine()
        engine.profiled = []  # pyright: ignore[reportAttributeAccessIssue]
        llm = SimpleNamespace(
            llm_engine=engine,
            start_profile=lambda folder: engine.profiled.append((str(folder), engine.core.get_metrics()["steps"])),
            stop_profile=lambda: engine.profiled.append(engine.core.get_metrics()["steps"]),
        )
        made.append(engine)
        return contextlib.nullcontext(llm)

    monkeypatch.setattr(driver, "start", start)
    return made


@pytest.fixture
def command(starts, capfd, tmp_path, monkeypatch):
    """Runs `jaxserve batch ...` in a folder with an in.jsonl of one good and one bad row -> (code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text(ROWS)

    def command(*arguments):
        code = cli.run(["batch", "--model", "demo", *map(str, arguments)])
        return code, *capfd.readouterr()

    return command


def test_a_folder_gets_parts_and_the_totals_are_told(command, tmp_path):
    code, out, err = command("in.jsonl", "out")
    assert code == 3
    assert out.startswith("2 rows, 1 failed, 3 tokens in ")
    assert err == "0/2 rows\nfirst failure: b: prompt must be a non-empty string or list of token ids\n"
    assert sorted(os.listdir(tmp_path / "out")) == ["manifest.json", "part-00000-000000.jsonl"]


def test_the_run_is_profiled(command, starts, tmp_path):
    command("in.jsonl", "out", "--profile", str(tmp_path / "profile"))
    assert starts[0].profiled == [(str(tmp_path / "profile"), 0), 3]


def test_the_totals_come_as_json(command):
    code, out, _ = command("in.jsonl", "out", "--json")
    totals = json.loads(out)
    assert code == 3
    assert {name: totals[name] for name in ("rows", "rows_done_before", "failed")} == {
        "rows": 2,
        "rows_done_before": 0,
        "failed": 1,
    }
    assert (totals["prompt_tokens"], totals["cached_prompt_tokens"], totals["generated_tokens"]) == (3, 0, 3)
    assert totals["generated_tokens_per_s"] == pytest.approx(3 / totals["elapsed_s"])


def test_a_name_with_jsonl_gets_one_file_and_no_parts(command, tmp_path):
    (tmp_path / "in.jsonl").write_text(ROWS.splitlines()[0] * 1 + "\n")
    assert command("in.jsonl", "out.jsonl", "--part-rows", 1)[0] == 0
    (line,) = (tmp_path / "out.jsonl").read_text().splitlines()
    assert json.loads(line)["response"]["body"]["choices"][0]["text"] == "abc"
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.jsonl"]


def test_a_finished_file_is_replaced_only_when_told_so(command, tmp_path):
    command("in.jsonl", "out.jsonl")
    before = (tmp_path / "out.jsonl").read_bytes()
    code, _, err = command("in.jsonl", "out.jsonl")
    assert (code, err) == (2, "error: out.jsonl exists; give another OUT, or --overwrite to replace it\n")
    (tmp_path / "in.jsonl").write_text('{"prompt": "new"}\n')
    assert command("in.jsonl", "out.jsonl", "--overwrite")[0] == 0
    assert (tmp_path / "out.jsonl").read_bytes() != before


def test_a_finished_file_stays_wherever_its_parts_were_being_removed(command, starts, tmp_path, monkeypatch):
    (tmp_path / "in.jsonl").write_text("".join(f'{{"prompt": "{i}", "max_tokens": 2}}\n' for i in range(3)))
    arguments = ("in.jsonl", "out.jsonl", "--part-rows", 1)
    removals = [*[(LocalFileSystem, "rm_file")] * 4, (Path, "rmdir")]
    for stop, (owner, name) in enumerate(removals):
        left = [stop]
        real = getattr(owner, name)

        def remove(*paths, left=left, real=real, name=name):
            if not left[0] or name == "rmdir":
                raise OSError("killed, as planted")
            left[0] -= 1
            return real(*paths)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, remove)
            assert command(*arguments)[0] == 2
        whole = (tmp_path / "out.jsonl").read_bytes()
        code, _, err = command(*arguments)
        assert (code, "out.jsonl exists" in err) == ((2, True) if stop else (0, False))  # the manifest was still there
        assert (tmp_path / "out.jsonl").read_bytes() == whole
        assert len(starts) == stop + 1  # nothing was answered again
        assert command(*arguments, "--overwrite")[0] == 0 if stop else True
        for path in (tmp_path / "out.jsonl", *tmp_path.glob("out.jsonl.parts/*")):
            path.unlink(missing_ok=True)
        starts[:] = starts[: stop + 1]


def test_a_job_that_is_done_starts_no_engine(command, starts):
    command("in.jsonl", "out")
    code, out, _ = command("in.jsonl", "out")
    assert (code, len(starts)) == (3, 1)
    assert out.startswith("2 rows (2 done before), 1 failed, 0 tokens in ")


def test_parts_that_were_left_are_put_together_without_an_engine(command, starts, tmp_path):
    command("in.jsonl", "out.jsonl.parts")
    assert command("in.jsonl", "out.jsonl")[0] == 3
    assert len(starts) == 1
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.jsonl"]


def test_two_shards_share_the_rows(command, tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(f'{{"prompt": "{i}"}}\n' for i in range(10)))
    for index in (1, 0):
        sharding = ("--num-shards", 2, "--shard-index", index, "--part-rows", 2)
        code, out, _ = command("in.jsonl", "out", *sharding, "--json")
        assert (code, json.loads(out)["rows"]) == (0, (6, 4)[index])
    parts = sorted(name for name in os.listdir(tmp_path / "out") if name.startswith("part"))
    assert parts == [f"part-0000{i % 2}-00000{i}.jsonl" for i in (0, 2, 4, 1, 3)]


def test_without_options_a_process_takes_its_place_among_jaxs(command, tmp_path, monkeypatch):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n' * 10)
    monkeypatch.setattr(jax, "process_index", lambda: 2)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    assert json.loads(command("in.jsonl", "out", "--part-rows", 1, "--json")[1])["rows"] == 3
    parts = sorted(name for name in os.listdir(tmp_path / "out") if name.startswith("part"))
    assert parts == [f"part-00002-00000{i}.jsonl" for i in (2, 5, 8)]


def test_another_model_or_seed_is_another_job(command):
    command("in.jsonl", "out")
    code, _, err = command("in.jsonl", "out", "--seed", 1, "--dtype", "float32")
    assert code == 2
    assert err == (
        "error: out holds the results of another job: seed was 0, now 1, dtype was not given, now 'float32'. "
        "Give another OUT, or --overwrite to throw them away\n"
    )
    assert command("in.jsonl", "out", "--page-size", 8, "--window-rows", 1)[0] == 3  # these change no answer
    assert command("in.jsonl", "out", "--seed", 1, "--overwrite")[0] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("none.jsonl", "out"), "No such file or directory: none.jsonl"),
        (("in.jsonl", "in.jsonl"), "in.jsonl exists; give another OUT"),
        (("in.jsonl", "in.jsonl", "--overwrite"), "OUT must be apart from the input, a folder of its own"),
        (("in.jsonl", "."), "OUT must be apart from the input, a folder of its own, got ."),
        (("in.jsonl", "out", "--num-shards", 2), "--num-shards and --shard-index belong together"),
        (("in.jsonl", "out", "--num-shards", 2, "--shard-index", 2), "must be less than --num-shards (2), got 2"),
        (("in.jsonl", "out.jsonl", "--num-shards", 2, "--shard-index", 0), "OUT must be a folder of part files"),
        (("in.jsonl", "memory://out.jsonl"), "OUT must be a folder of part files"),
        (("in.jsonl", "out", "--part-rows", 0), "Invalid value for '--part-rows'"),
    ],
)
def test_a_mistake_is_told_in_one_line_before_the_engine_starts(command, starts, tmp_path, arguments, message):
    code, out, err = command(*arguments)
    assert (code, out, len(starts)) == (2, "", 0)
    assert message in err
    assert len(err.splitlines()) == 1
    assert (tmp_path / "in.jsonl").read_text() == ROWS


def test_without_grain_the_command_says_what_to_install(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    for name in [name for name in sys.modules if name.startswith("jaxserve.batch")]:
        monkeypatch.delitem(sys.modules, name)
    code, _, err = command("in.jsonl", "out")
    assert code == 2
    assert 'pip install "jaxserve[batch]", or in a checkout: .venv/bin/pip install -e ".[batch]"' in err


# -------------------------------------------------------------------------------------------------------- progress


def test_without_a_terminal_progress_is_plain_lines(command, tmp_path, monkeypatch):
    monkeypatch.setattr(command_module, "PLAIN_INTERVAL_S", 0.0)
    (tmp_path / "in.jsonl").write_text('{"prompt": "abc", "max_tokens": 3}\n{\n')
    _, out, err = command("in.jsonl", "out", "--part-rows", 1)
    *lines, last, failure = err.splitlines()
    assert last.startswith("2/2 rows, 1 failed, ")
    assert last.endswith(" tokens/s, ETA 0:00:00")
    assert lines
    assert failure.startswith("first failure: ")
    assert "\x1b" not in err + out
    (tmp_path / "out" / "part-00000-000001.jsonl").unlink()
    _, _, err = command("in.jsonl", "out", "--part-rows", 1)
    assert err.splitlines()[0] == "1/2 rows are done already"


def test_plain_lines_come_once_an_interval(capsys):
    totals = Totals(num_rows=200, done=50, done_before=50)
    show = command_module.PlainProgress(totals, interval_s=10.0)
    for second in range(1, 46):
        totals.elapsed_s, totals.done, totals.generated_tokens = float(second), 50 + second, 7 * second
        show(totals)
    assert capsys.readouterr().err.splitlines() == [
        "50/200 rows are done already",
        *(f"{50 + s}/200 rows, 7.0 tokens/s, ETA 0:0{(150 - s) // 60}:{(150 - s) % 60:02}" for s in (10, 20, 30, 40)),
    ]


def test_the_time_left_is_unknown_before_a_few_rows():
    totals = Totals(num_rows=16, done=4, done_before=4, elapsed_s=4.0)
    assert totals.remaining_s is None
    totals.done = 11
    assert totals.remaining_s is None
    totals.done = 12
    assert totals.remaining_s == 2.0
    totals.done = totals.num_rows
    assert totals.remaining_s == 0.0


def test_on_a_terminal_there_is_a_bar(command, tmp_path, monkeypatch):
    (tmp_path / "in.jsonl").write_text('{"prompt": "abc", "max_tokens": 50}\n' * 40)
    ours, theirs = pty.openpty()
    with ThreadPoolExecutor() as threads:
        reading = threads.submit(read_all, ours)
        with open(theirs, "w", encoding="utf-8") as terminal:
            monkeypatch.setattr(sys, "stderr", terminal)
            assert command("in.jsonl", "out")[0] == 0
    shown = reading.result()
    os.close(ours)
    assert "40/40" in shown
    assert "tokens/s, ETA 0:00:00" in shown


def read_all(terminal):
    shown = b""
    with contextlib.suppress(OSError):  # how the end of a terminal shows
        while piece := os.read(terminal, 1 << 16):
            shown += piece
    return shown.decode()
