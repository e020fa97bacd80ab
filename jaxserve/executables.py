"""Step programs compiled for this machine, and kept on disk under a key that takes no trace to find.

JAX's own cache is keyed by the lowered program: every start traces and lowers all of them again, one after the other
under Python's lock, which takes longer than all the rest of a start. Here the key is what a program follows from: the
function, the shapes of its arguments, the model's configuration, the code of this package, the versions and the device.

Nor do compiles run beside each other in one process: locks in XLA and Python's own let hardly more than one get on. So
threads that compile for a GPU have a process each that does it for them (`aside`), and load what it has written.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from jaxserve.models.base import Model

logger = logging.getLogger(__name__)

COMPILER_OPTIONS = {
    "gpu": {
        "xla_gpu_enable_triton_gemm": False,  # they copy each layer's weights out of the stack
        "xla_gpu_autotune_level": 0,  # takes two thirds of a compile and finds nothing faster than cuBLAS's own choice
        # It counts donated buffers twice, believes memory to be short, and then computes matmuls twice to save it
        "xla_disable_hlo_passes": "rematerialization",
    }
}


def compiled(function: Any, *arguments: Any, **static: Any) -> Callable:
    """A jitted function compiled for `arguments`: shapes, and first the model where the function takes one.

    On an accelerator it comes from the folder "steps" in JAX's compilation cache, if there is one and the program was
    compiled before. A CPU's programs are tied to its instruction set, which no key tells.
    """
    cache = jax.config.jax_compilation_cache_dir
    if cache is None or jax.default_backend() == "cpu":
        return _compile(function, arguments, static)
    return load_or_compile(Path(cache) / "steps", function, arguments, static)


def load_or_compile(directory: Path, function: Any, arguments: tuple, static: dict[str, Any]) -> Callable:
    """The program from its file in `directory`; where that is missing or damaged, compiled and written there."""
    path = directory / f"{function.__name__}-{_key(function, arguments, static)}"
    program = _load(path, arguments)
    if program is None and _this_thread.aside is not None:
        _this_thread.aside.compile(path, function, arguments, static)
        program = _load(path, arguments)
    if program is not None:
        return program
    program = _compile(function, arguments, static)
    try:
        _write(path, program)
    except OSError as error:
        logger.warning("a compiled program could not be kept in %s: %s", path, error)
    return program


def _load(path: Path, arguments: tuple) -> Callable | None:
    try:
        program = pickle.loads(path.read_bytes())
        return serialize_executable.deserialize_and_load(*program, execution_devices=_devices(arguments))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:  # whatever a damaged file raises
        logger.warning("the compiled program in %s cannot be loaded and is compiled anew: %s", path, error)
        return None


def _compile(function: Any, arguments: tuple, static: dict[str, Any]) -> Any:
    options = COMPILER_OPTIONS.get(jax.default_backend())
    return function.lower(*arguments, **static).compile(compiler_options=options)


def _key(function: Any, arguments: tuple, static: dict[str, Any]) -> str:
    leaves, tree = jax.tree.flatten(arguments)
    device = jax.devices()[0]
    parts = (
        function.__name__,
        [str(leaf.config if isinstance(leaf, Model) else leaf) for leaf in leaves],
        str(tree),
        sorted(static.items()),
        _code(),
        (jax.__version__, device.client.platform_version, device.device_kind, jax.device_count()),
        [os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")],
        (jax.config.jax_default_matmul_precision, jax.config.jax_enable_x64),
        COMPILER_OPTIONS,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _devices(arguments: tuple) -> list[Any]:
    """Where the arguments are, in the order of a mesh."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(arguments))
    found = {device for sharding in shardings if sharding is not None for device in sharding.device_set}
    return sorted(found, key=lambda device: device.id) or jax.devices()[:1]


@functools.cache
def _code() -> str:
    """A digest of this package's source."""
    digest = hashlib.sha256()
    for folder, folders, names in os.walk(Path(__file__).parent, followlinks=True):
        folders.sort()
        for name in sorted(names):
            if name.endswith((".py", ".json")):
                digest.update(Path(folder, name).read_bytes())
    return digest.hexdigest()


def _write(path: Path, program: Any) -> None:
    """All of it or nothing, also beside other processes that write the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        file = Path(folder, "program")
        file.write_bytes(pickle.dumps(serialize_executable.serialize(program)))
        file.replace(path)


class _Aside:
    """A process that compiles for this one. It starts with the first program."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._fails = False

    def compile(self, path: Path, function: Any, arguments: tuple, static: dict[str, Any]) -> None:
        """Has the program written to `path`; where that fails the log says why, and it is the last try."""
        if self._fails or not set(_devices(arguments)) <= set(jax.devices()[:1]):
            return
        job = (path, function.__module__, function.__name__, jax.tree.map(_Portable.of, arguments), static)
        try:
            problem = self._ask(job)
        except (OSError, EOFError) as error:
            problem = f"it has ended: {error!r}"
        if problem:
            logger.warning("the process that compiles for a thread failed, the thread goes on alone: %s", problem)
            self._fails = True

    def _ask(self, job: tuple) -> str | None:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jaxserve.executables"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process
                # The card's memory belongs to this process; the other one takes what it needs, which is little
                env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump(job, self._process.stdin)
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()  # it ends with its input


@dataclasses.dataclass(frozen=True)
class _Portable:
    """An array's shape, which in another process means that process's first device."""

    shape: tuple[int, ...]
    dtype: Any
    placed: bool

    @classmethod
    def of(cls, leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        return cls(leaf.shape, leaf.dtype, leaf.sharding is not None)

    def here(self) -> jax.ShapeDtypeStruct:
        place = jax.sharding.SingleDeviceSharding(jax.devices()[0]) if self.placed else None
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=place)


class _ThisThread(threading.local):
    aside: _Aside | None = None


_this_thread = _ThisThread()


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Inside, this thread has a process of its own for what it must compile, where the device can be shared: a GPU."""
    if jax.default_backend() != "gpu":
        yield
        return
    _this_thread.aside = _Aside()
    try:
        yield
    finally:
        _this_thread.aside, ended = None, _this_thread.aside
        ended.close()


def _serve() -> None:
    """The other process: compiles what comes in, answers with what went wrong, and ends with its input."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whoever prints does not print into the answers
    while True:
        try:
            path, module, name, arguments, static = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            arguments = jax.tree.map(lambda leaf: leaf.here() if isinstance(leaf, _Portable) else leaf, arguments)
            _write(path, _compile(getattr(importlib.import_module(module), name), arguments, static))
            problem = None
        except Exception as error:  # all of them are for the other side
            problem = repr(error)
        pickle.dump(problem, answers)
        answers.flush()


if __name__ == "__main__":
    # Pickled classes belong to the module by its name, not to the one that runs
    importlib.import_module("jaxserve.executables")._serve()
