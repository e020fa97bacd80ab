"""Where a job reads and writes: a path, or a URL that fsspec knows."""

import os
import uuid
from collections.abc import Iterable
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

UNFINISHED = ".unfinished.tmp"  # how the name of a file ends that is being written


def locate(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of a path or URL, and the path in it.

    Raises:
        ValueError: nothing installed can open such a URL.
    """
    try:
        fs, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:  # the plug-in of a known protocol is missing, or it is not known
        raise ValueError(f"cannot open {url}: {error}") from error
    return fs, path.rstrip("/") or path


def is_local(fs: fsspec.AbstractFileSystem) -> bool:
    return isinstance(fs, LocalFileSystem)


def put(fs: fsspec.AbstractFileSystem, path: str, data: bytes) -> None:
    """Writes a whole file at once: whoever looks sees all of it or nothing, whenever this process is killed."""
    if is_local(fs):
        put_local(Path(path), [data], scratch=Path(path).parent)
    else:
        fs.pipe_file(path, data)  # an object appears when its upload is complete


def put_local(path: Path, pieces: Iterable[bytes], *, scratch: Path) -> None:
    """`put` for a local file that comes in pieces; `scratch` is a folder of the same disk."""
    temporary = scratch / f".{path.name}.{uuid.uuid4().hex}{UNFINISHED}"
    try:
        with temporary.open("xb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())  # before the name: a machine that loses power must not leave an empty file
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the name, too
    finally:
        os.close(folder)
