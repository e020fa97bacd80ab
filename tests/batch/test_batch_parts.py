"""The output: each part whole or not there, and never two jobs in one folder."""

import dataclasses
import json
import os
import resource
from pathlib import Path

import fsspec
import pytest

from jaxserve.batch.parts import Manifest, Parts

MANIFEST = Manifest(input_sha256="abc", num_rows=5, part_rows=2, num_shards=1, options={"model": "demo", "seed": 0})
LINES = [b'{"id": "0", "error": null}\n', b'{"id": "1", "error": {"code": "x"}}\n']


@pytest.fixture(params=["local", "file", "memory"])
def folder(request, tmp_path):
    if request.param == "memory":
        yield "memory://batch-parts/out"
        fsspec.filesystem("memory").store.clear()
    else:
        yield f"{'file://' if request.param == 'file' else ''}{tmp_path}/new/out"


def begun(folder, manifest=MANIFEST, **options):
    parts = Parts(folder, manifest, **{"shard": 0, **options})
    parts.begin()
    return parts


def names(parts):
    return sorted(path.rsplit("/", 1)[-1] for path in parts.fs.ls(parts.folder, detail=False))


def test_parts_that_exist_are_what_is_done(folder):
    parts = begun(folder)
    assert parts.done == set()
    parts.write(1, LINES)
    assert names(parts) == ["manifest.json", "part-00000-000001.jsonl"]
    again = begun(folder)
    assert again.done == {1}
    assert again.count(1) == (2, 1)
    assert again.fs.cat_file(again.path(1)) == b"".join(LINES)


def test_a_shard_sees_its_own_parts_alone(folder):
    manifest = dataclasses.replace(MANIFEST, num_shards=2)
    begun(folder, manifest, shard=0).write(0, LINES)
    begun(folder, manifest, shard=1).write(1, LINES)
    assert begun(folder, manifest, shard=0).done == {0}
    assert begun(folder, manifest, shard=1).done == {1}


def test_looking_changes_nothing(folder):
    parts = Parts(folder, MANIFEST, shard=0)
    assert not parts.fs.exists(parts.folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_sha256": "other"}, "input_sha256 was 'abc', now 'other'"),
        ({"num_shards": 2}, "num_shards was 1, now 2"),
        ({"options": {"model": "demo", "seed": 1}}, "seed was 0, now 1"),
        ({"options": {"seed": 0, "dtype": "float32"}}, "model was 'demo', now not given, dtype was not given, now"),
    ],
)
def test_another_job_is_refused_and_says_what_differs(folder, change, message):
    begun(folder).write(0, LINES)
    other = dataclasses.replace(MANIFEST, **change)
    with pytest.raises(ValueError, match=message):
        Parts(folder, other, shard=0)
    assert begun(folder).done == {0}


def test_overwrite_throws_another_jobs_parts_away_and_keeps_its_own(folder):
    begun(folder).write(0, LINES)
    assert begun(folder, overwrite=True).done == {0}
    other = dataclasses.replace(MANIFEST, input_sha256="other")
    parts = Parts(folder, other, shard=0, overwrite=True)
    assert parts.done == set()
    assert "part-00000-000000.jsonl" in names(parts)  # until the engine runs
    parts.begin()
    assert names(parts) == ["manifest.json"]
    assert json.loads(parts.fs.cat_file(f"{parts.folder}/manifest.json"))["input_sha256"] == "other"


def test_overwrite_is_the_way_out_where_the_manifest_is_lost(folder):
    begun(folder).write(0, LINES)
    parts = Parts(folder, MANIFEST, shard=0)
    parts.fs.rm_file(f"{parts.folder}/manifest.json")
    with pytest.raises(ValueError, match="or --overwrite to throw them away"):
        Parts(folder, MANIFEST, shard=0)
    assert names(begun(folder, overwrite=True)) == ["manifest.json"]


def test_several_shards_overwrite_nothing(folder):
    begun(folder).write(0, LINES)
    with pytest.raises(ValueError, match="Empty it first: several shards cannot agree on who does"):
        Parts(folder, dataclasses.replace(MANIFEST, num_shards=2), shard=0, overwrite=True)


@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff"])
def test_a_manifest_that_is_none_is_another_jobs(folder, content):
    parts = begun(folder)
    parts.fs.pipe_file(f"{parts.folder}/manifest.json", content)
    with pytest.raises(ValueError, match="holds the results of another job"):
        Parts(folder, MANIFEST, shard=0)


def test_parts_without_a_manifest_are_another_jobs(folder):
    parts = begun(folder)
    parts.write(0, LINES)
    parts.fs.rm_file(f"{parts.folder}/manifest.json")
    with pytest.raises(ValueError, match=r"it has parts, but no manifest\.json"):
        Parts(folder, MANIFEST, shard=0)


def test_files_of_others_are_left_alone(folder):
    parts = begun(folder)
    parts.fs.pipe_file(f"{parts.folder}/notes.txt", b"mine")
    parts.fs.pipe_file(f"{parts.folder}/part-00000-000000.jsonl.gz", b"mine")
    begun(folder, dataclasses.replace(MANIFEST, num_rows=6), overwrite=True)
    assert {"notes.txt", "part-00000-000000.jsonl.gz"} <= set(names(parts))


def test_a_part_that_is_no_output_is_told(folder):
    parts = begun(folder)
    parts.write(0, [b'{"id": "0", "err'])
    with pytest.raises(ValueError, match=r"part-00000-000000.jsonl is damaged \(.*\): delete it, and run again"):
        parts.count(0)


def test_a_full_disk_leaves_no_half_part(tmp_path):
    parts = begun(str(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(LINES[0]) + 5, hard))  # the kernel writes so many bytes, no more
    try:
        with pytest.raises(OSError, match="File too large"):
            parts.write(0, LINES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(parts) == ["manifest.json"]
    parts.write(0, LINES)
    assert begun(str(tmp_path)).count(0) == (2, 1)


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_write_that_fails_late_leaves_no_half_part(tmp_path, monkeypatch, broken):
    parts = begun(str(tmp_path))

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(*((os, "fsync") if broken == "fsync" else (Path, "replace")), fail)
        with pytest.raises(OSError, match="No space left on device"):
            parts.write(0, LINES)
    assert names(parts) == ["manifest.json"]


def test_a_part_and_its_name_are_on_the_disk_before_the_write_returns(tmp_path, monkeypatch):
    parts, synced = begun(str(tmp_path)), []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append((os.readlink(f"/proc/self/fd/{fd}"), names(parts))))
    parts.write(0, LINES)
    (file, _), (folder, found) = synced
    assert file.endswith(".unfinished.tmp")
    assert (folder, found) == (str(tmp_path), ["manifest.json", "part-00000-000000.jsonl"])


def test_what_a_killed_shard_was_writing_is_cleared_by_its_next_run(tmp_path):
    begun(str(tmp_path), dataclasses.replace(MANIFEST, num_shards=2))
    mine, other = ".part-00000-000001.jsonl.ab.unfinished.tmp", ".part-00001-000001.jsonl.cd.unfinished.tmp"
    for name in (mine, other):
        (tmp_path / name).write_bytes(b'{"id": "0", "err')
    begun(str(tmp_path), dataclasses.replace(MANIFEST, num_shards=2))
    assert sorted(os.listdir(tmp_path)) == [other, "manifest.json"]


def test_a_lone_shard_clears_all_that_was_unfinished(tmp_path):
    for name in (".manifest.json.ab.unfinished.tmp", ".out.jsonl.cd.unfinished.tmp", ".notes"):
        (tmp_path / name).touch()
    begun(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == [".notes", "manifest.json"]


def test_a_job_that_came_first_meanwhile_is_seen(folder):
    late = Parts(folder, dataclasses.replace(MANIFEST, num_rows=6), shard=0)
    begun(folder)
    with pytest.raises(ValueError, match=r"num_rows was 5, now 6\. Give another OUT"):
        late.begin()


def test_a_part_has_the_rights_of_a_new_file(tmp_path):
    parts = begun(str(tmp_path))
    parts.write(0, LINES)
    (tmp_path / "plain").touch()
    assert (tmp_path / "part-00000-000000.jsonl").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_joining_leaves_one_file_and_no_folder(tmp_path):
    parts = begun(str(tmp_path / "out.jsonl.parts"))
    parts.write(1, [b"2\n"])
    parts.write(0, [b"0\n", b"1\n"])
    parts.join(tmp_path / "out.jsonl", 2)
    assert (tmp_path / "out.jsonl").read_bytes() == b"0\n1\n2\n"
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_joining_spares_what_it_did_not_write(tmp_path):
    parts = begun(str(tmp_path / "parts"))
    (tmp_path / "parts" / "notes.txt").touch()
    parts.join(tmp_path / "out.jsonl", 0)
    assert os.listdir(tmp_path / "parts") == ["notes.txt"]
