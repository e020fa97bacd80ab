"""The output of a job: a folder of part files, each written once, and a manifest that says which job they are of."""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from jaxserve.batch.storage import UNFINISHED, is_local, locate, put, put_local

FORMAT = 1
_PART = re.compile(r"part-(\d{5,})-(\d{6,})\.jsonl")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a job is: two runs that differ here must not share a folder."""

    input_sha256: str
    num_rows: int
    part_rows: int
    num_shards: int
    options: dict[str, Any]  # that change the answers: model, seed, ...
    format: int = FORMAT


class Parts:
    """The part files of one shard, `part-SSSSS-NNNNNN.jsonl`: S is the shard, N the part of the input, from 0."""

    def __init__(self, url: str, manifest: Manifest, *, shard: int, overwrite: bool = False):
        """Compares the folder, if there is one, with the job. Changes nothing yet.

        Raises:
            OSError: the folder cannot be read.
            ValueError: it holds the results of another job, and `overwrite` is False.
        """
        self.fs, self.folder = locate(url)
        self.shard, self.num_shards = shard, manifest.num_shards
        self._url, self._manifest = url, manifest
        self._others = self._conflict()
        if self._others and not overwrite:
            raise self._another_job(self._others, "Give another OUT, or --overwrite to throw them away")
        if self._others and manifest.num_shards > 1:
            raise self._another_job(self._others, "Empty it first: several shards cannot agree on who does")
        self.done = frozenset() if self._others else frozenset(self._numbers())

    def begin(self) -> None:
        """Makes the folder this job's: throws another job's parts away, writes the manifest.

        Raises:
            ValueError: another job has begun there meanwhile.
        """
        if is_local(self.fs):
            self.fs.makedirs(self.folder, exist_ok=True)
        names = self._names()
        if self._others:
            self._remove([name for name in names if _PART.fullmatch(name) or name == "manifest.json"])
        elif begun := self._conflict():
            raise self._another_job(begun, "Give another OUT")
        mine = "." if self.num_shards == 1 else f".part-{self.shard:05}-"  # what a killed run left behind
        self._remove([name for name in names if name.startswith(mine) and name.endswith(UNFINISHED)])
        if self._read_manifest() is None:
            text = json.dumps(dataclasses.asdict(self._manifest), indent=2)
            put(self.fs, f"{self.folder}/manifest.json", text.encode())

    def write(self, number: int, lines: Sequence[bytes]) -> None:
        """Writes a part, whole or not at all.

        Raises:
            OSError: it could not be written; nothing half written is left.
        """
        put(self.fs, self.path(number), b"".join(lines))

    def path(self, number: int) -> str:
        return f"{self.folder}/part-{self.shard:05}-{number:06}.jsonl"

    def count(self, number: int) -> tuple[int, int]:
        """Rows of a part that is done, and how many of them failed.

        Raises:
            ValueError: something that is no output line.
        """
        try:
            lines = [_decode_line(line) for line in self.fs.cat_file(self.path(number)).splitlines()]
        except msgspec.MsgspecError as error:
            raise ValueError(f"{self.path(number)} is damaged ({error}): delete it, and run again") from error
        return len(lines), sum(line.error is not None for line in lines)

    def join(self, target: Path, num_parts: int) -> None:
        """Puts all parts together into one file, at once, and removes them. For a job of one shard on a local disk.

        The manifest goes first: a folder without one is no job that could go on and replace the file.
        """
        texts = (Path(self.path(number)).read_bytes() for number in range(num_parts))
        put_local(target, texts, scratch=Path(self.folder))
        self._remove(["manifest.json", *(Path(self.path(number)).name for number in range(num_parts))])
        if not self._names():
            Path(self.folder).rmdir()

    def _another_job(self, conflict: str, way_out: str) -> ValueError:
        return ValueError(f"{self._url} holds the results of another job: {conflict}. {way_out}")

    def _conflict(self) -> str:
        """In which way what the folder holds is another job, or an empty text."""
        found, wanted = self._read_manifest(), dataclasses.asdict(self._manifest)
        if found is None:
            return "it has parts, but no manifest.json" if any(map(_PART.fullmatch, self._names())) else ""
        before, now = _flat(found), _flat(wanted)
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        return ", ".join(f"{name} was {_shown(before.get(name))}, now {_shown(now.get(name))}" for name in names)

    def _read_manifest(self) -> dict[str, Any] | None:
        try:
            found = json.loads(self.fs.cat_file(f"{self.folder}/manifest.json"))
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def _numbers(self) -> list[int]:
        found = [match for name in self._names() if (match := _PART.fullmatch(name))]
        return [int(match[2]) for match in found if int(match[1]) == self.shard]

    def _names(self) -> list[str]:
        self.fs.invalidate_cache()
        try:
            return [path.rsplit("/", 1)[-1] for path in self.fs.ls(self.folder, detail=False)]
        except FileNotFoundError:
            return []

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            self.fs.rm_file(f"{self.folder}/{name}")


class _Line(msgspec.Struct):
    """The part of an output line that is counted."""

    error: dict[str, Any] | None


_decode_line = msgspec.json.Decoder(_Line).decode


def _flat(manifest: dict[str, Any]) -> dict[str, Any]:
    options = manifest.get("options")
    return {**manifest, **(options if isinstance(options, dict) else {}), "options": None}


def _shown(value: Any) -> str:
    return "not given" if value is None else repr(value)
