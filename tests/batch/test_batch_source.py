"""The input: rows found by number in files, folders, globs and URLs, with little in memory."""

import os
import sys

import fsspec
import pytest

from jaxserve.batch.source import Source, require_apart


def rows_of(source):
    return [row for part in range(source.num_parts) for row in source.read(part)]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b.jsonl").write_bytes(b'{"n": 3}\n\n{"n": 4}')
    (tmp_path / "a.jsonl").write_bytes(b'\n{"n": 0}\r\n  \n{"n": 1}\n{"n": 2}\n')
    (tmp_path / "c.txt").write_bytes(b"no row\n")
    return tmp_path


@pytest.mark.parametrize("pattern", ["", "/", "/*.jsonl", "/[ab].jsonl"])
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_rows_are_numbered_through_all_files_in_the_order_of_their_names(folder, pattern, scheme):
    source = Source(f"{scheme}{folder}{pattern}", part_rows=2)
    assert (source.num_rows, source.num_parts) == (5, 3)
    assert [source.rows_in(part) for part in range(3)] == [2, 2, 1]
    assert [(number, line.strip()) for number, line in rows_of(source)] == [
        (n, b'{"n": %d}' % n) for n in range(5)
    ]  # the second part lies in two files


def test_a_url_of_another_file_system_is_read():
    fsspec.filesystem("memory").pipe_file("/batch-source/in.jsonl", b'{"n": 0}\n{"n": 1}\n')
    source = Source("memory://batch-source/in.jsonl", part_rows=1)
    assert rows_of(source) == [(0, b'{"n": 0}'), (1, b'{"n": 1}')]


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_a_file_without_rows_has_no_parts(tmp_path, content):
    (tmp_path / "in.jsonl").write_bytes(content)
    source = Source(str(tmp_path / "in.jsonl"), part_rows=2)
    assert (source.num_rows, source.num_parts, rows_of(source)) == (0, 0, [])


def test_a_name_that_looks_like_a_pattern_is_a_name_first(tmp_path):
    (tmp_path / "in[1].jsonl").write_bytes(b"{}\n")
    assert Source(str(tmp_path / "in[1].jsonl"), part_rows=2).num_rows == 1


def test_the_fingerprint_follows_the_bytes_and_not_the_names(tmp_path):
    def sha256(*contents):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name, content in zip("xy", contents, strict=False):
            (folder / f"{len(list(tmp_path.iterdir()))}{name}.jsonl").write_bytes(content)
        return Source(str(folder), part_rows=2).sha256

    assert sha256(b"1\n2\n") == sha256(b"1\n2\n")
    assert len({sha256(b"1\n2\n"), sha256(b"2\n1\n"), sha256(b"1\n", b"2\n"), sha256(b"1\n2\n", b"")}) == 4


def test_later_rows_with_the_custom_id_of_an_earlier_one_are_known(tmp_path):
    lines = ['{"custom_id": "a"}', "{", '{"custom_id": "b"}', '{"custom_id": "a"}', "{}", "{}", '{"custom_id": 7}',
             '{"custom_id": 7}', '{"x": 1, "custom_id": "a"}']  # fmt: skip
    (tmp_path / "in.jsonl").write_bytes("\n".join(lines).encode() + b'\n{"custom_id": "\xff"}\n{"custom_id": "\xff"}')
    assert Source(str(tmp_path / "in.jsonl"), part_rows=2).repeated == {3, 8}


def test_the_id_of_a_row_without_one_counts_too(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"custom_id": "row-1"}\n{}\n{"custom_id": "row-3"}\n{\n{"custom_id": ""}')
    assert Source(str(tmp_path / "in.jsonl"), part_rows=2).repeated == {1, 3}


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("none.jsonl", FileNotFoundError, "No such file or directory: 'none.jsonl'"),
        ("none/*.jsonl", ValueError, "matches no file"),
        (".", ValueError, r"no input: .*/\*.jsonl matches no file"),
        ("nowhere://x/in.jsonl", ValueError, "cannot open nowhere://x/in.jsonl: Protocol not known"),
    ],
)
def test_an_input_that_is_not_there_is_told(tmp_path, monkeypatch, url, error, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        Source(url, part_rows=2)


def test_an_input_that_changes_meanwhile_is_told(folder):
    source = Source(str(folder / "a.jsonl"), part_rows=2)
    os.truncate(folder / "a.jsonl", 9)
    with pytest.raises(ValueError, match="the input changed while the job ran"):
        source.read(0)


def test_rows_that_change_in_place_are_told(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"n": 0}\n{"n": 1}\n\n{"n": 2}\n')
    (tmp_path / "b.jsonl").write_bytes(b'{"n": 3}\n{"n": 4}\n')
    source = Source(str(tmp_path), part_rows=2)
    (tmp_path / "b.jsonl").write_bytes(b'{"n": 7}\n{"n": 4}\n')
    assert [number for part in (0, 2) for number, _ in source.read(part)] == [0, 1, 4]
    with pytest.raises(ValueError, match="the input changed while the job ran"):
        source.read(1)


def test_a_plug_in_that_is_missing_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(
        ValueError, match=r"cannot open gs://b/in\.jsonl: Please install gcsfs to access Google Storage"
    ):
        Source("gs://b/in.jsonl", part_rows=2)


@pytest.mark.parametrize("target", ["", "/", "/a.jsonl"])
def test_the_output_must_be_apart_from_the_input(folder, target):
    with pytest.raises(ValueError, match="OUT must be apart from the input"):
        require_apart(Source(str(folder), part_rows=2), f"{folder}{target}")


def test_links_and_detours_to_the_input_are_found(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    source = Source(str(folder), part_rows=2)
    file = source.files[0].rsplit("/", 1)[1]
    for target in (f"{tmp_path}/link", f"{tmp_path}/link/{file}", f"{folder}/../{folder.name}/{file}"):
        with pytest.raises(ValueError, match="OUT must be apart from the input"):
            require_apart(source, target)


def test_another_folder_is_apart_and_so_is_another_file_system(folder):
    source = Source(str(folder), part_rows=2)
    require_apart(source, f"{folder}/out")
    require_apart(source, f"memory://{folder}")
