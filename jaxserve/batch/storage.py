"""Where a job reads and writes: a path, or a URL that fsspec knows."""

import os
import tempfile
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem


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
        put_local(Path(path), [data])
    else:
        fs.pipe_file(path, data)  # an object appears when its upload is complete


def put_local(path: Path, pieces) -> None:
    """`put` for a local file that comes in pieces."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())  # before the name: a machine that loses power must not leave an empty file
        os.chmod(name, 0o666 & ~_umask())  # mkstemp's files are private
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
