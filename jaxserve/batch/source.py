"""The input of a job: the lines of JSONL files, by number."""

import errno
import hashlib
import io
import os
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import fsspec
import msgspec
import numpy as np

from jaxserve.batch.rows import default_custom_id
from jaxserve.batch.storage import is_local, locate


class Span(NamedTuple):
    """Bytes [start, end) of one file."""

    path: str
    start: int
    end: int


class Source:
    """The rows of a file, of the *.jsonl files of a folder, or of a glob; local or a URL of fsspec.

    A row is a line that is not blank. Rows are numbered from 0 through all files in the order of their names, and read
    in parts: part i holds the rows [i * part_rows, (i + 1) * part_rows). One pass over the bytes finds where parts
    begin; what stays in memory is that, a digest of each part, and 24 bytes for each row's custom_id.

    Attributes:
        fs, files: the file system and the paths in it.
        num_rows, num_parts: of the whole input.
        sha256: of the bytes of all files.
        repeated: numbers of the rows whose custom_id an earlier row has.

    Raises:
        OSError: the input is not there or cannot be read.
        ValueError: a URL that cannot be opened, or a folder or glob without files.
    """

    def __init__(self, url: str, *, part_rows: int):
        self.part_rows = part_rows
        self.fs, path = locate(url)
        self.files = input_files(self.fs, path, url)
        self.num_rows = 0
        self._parts: list[list[Span]] = []
        self._digests: list[Any] = []  # of each part's bytes
        custom_ids, digest = _CustomIds(), hashlib.sha256()
        for file in self.files:
            self._index(file, custom_ids, digest)
        self.sha256, self.repeated = digest.hexdigest(), custom_ids.repeated()

    @property
    def num_parts(self) -> int:
        return len(self._parts)

    def rows_in(self, part: int) -> int:
        """How many rows a part holds: `part_rows`, or fewer in the last one."""
        return min(self.part_rows, self.num_rows - part * self.part_rows)

    def read(self, part: int) -> list[tuple[int, bytes]]:
        """The rows of a part with their numbers. Safe to call from several threads.

        Raises:
            OSError: the input cannot be read.
            ValueError: the input is not what it was when this object was made.
        """
        texts: list[Any] = [self.fs.cat_file(span.path, start=span.start, end=span.end) for span in self._parts[part]]
        if _digest(*texts).digest() != self._digests[part].digest():
            raise ValueError("the input changed while the job ran; give the job a folder that nobody writes to")
        lines = [line for text in texts for line in text.split(b"\n") if line.strip()]
        first = part * self.part_rows
        return [(first + index, line) for index, line in enumerate(lines)]

    def _index(self, path: str, custom_ids: "_CustomIds", digest) -> None:
        at = start = 0
        with self.fs.open(path, "rb") as opened:
            file: Any = opened
            for line in file if is_local(self.fs) else io.BufferedReader(file, 1 << 22):  # a remote one has slow lines
                digest.update(line)
                if line.strip():
                    if self.num_rows % self.part_rows == 0:
                        self._close(path, start, at)
                        self._parts.append([])
                        self._digests.append(_digest())
                        start = at
                    custom_ids.add(self.num_rows, line)
                    self.num_rows += 1
                if self._digests:
                    self._digests[-1].update(line)
                at += len(line)
        self._close(path, start, at)
        digest.update(b"\n")  # two files are not one file cut elsewhere

    def _close(self, path: str, start: int, end: int) -> None:
        if self._parts and end > start:
            self._parts[-1].append(Span(path, start, end))


def _digest(*pieces: bytes):
    digest = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        digest.update(piece)
    return digest


def input_files(fs: fsspec.AbstractFileSystem, path: str, url: str) -> list[str]:
    """The files that a path stands for, in the order of their names.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a folder or glob without files.
    """
    if fs.isfile(path):
        return [path]
    if fs.isdir(path):
        pattern = f"{path}/*.jsonl"
    elif any(character in path for character in "*?["):
        pattern = path
    else:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url)
    matches: Any = fs.glob(pattern)
    found = sorted(filter(fs.isfile, matches))
    if not found:
        raise ValueError(f"no input: {pattern} matches no file")
    return found


def require_apart(source: Source, target: str) -> None:
    """Refuses an output that would become input, or the other way round.

    Raises:
        ValueError: `target` is one of the files, or the folder that holds one.
    """
    fs, path = locate(target)
    real = os.path.realpath if is_local(fs) else str  # links may lead to the same place
    taken = {real(place) for file in source.files for place in (file, file.rsplit("/", 1)[0])}
    if type(fs) is type(source.fs) and real(path) in taken:
        raise ValueError(f"OUT must be apart from the input, a folder of its own, got {target}")


class _WithId(msgspec.Struct):
    custom_id: str | None = None


class _CustomIds:
    """Finds ids that come twice. Keeps a hash of 128 bits of each, by which no two ids meet in practice."""

    def __init__(self) -> None:
        self._hashes, self._numbers = bytearray(), array("q")
        self._decode = msgspec.json.Decoder(_WithId).decode

    def add(self, number: int, line: bytes) -> None:
        try:
            custom_id = self._decode(line).custom_id
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            custom_id = None  # the row gets its error when its turn comes
        if custom_id is None:
            custom_id = default_custom_id(number)
        self._hashes += _digest(custom_id.encode()).digest()
        self._numbers.append(number)

    def repeated(self) -> frozenset[int]:
        hashes = np.frombuffer(self._hashes, np.uint64).reshape(-1, 2)
        order = np.lexsort((hashes[:, 0], hashes[:, 1]))  # stable: of equal ones the first row comes first
        hashes = hashes[order]
        again = order[1:][(hashes[1:] == hashes[:-1]).all(axis=1)]
        numbers: Sequence[int] = self._numbers
        return frozenset(numbers[index] for index in again)
