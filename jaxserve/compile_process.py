"""A process that compiles for a thread of another one.

Compiles do not run beside each other in one process: under locks of XLA's and Python's own, hardly more than one gets
on. So threads that compile for a GPU have a process each, which they give what is not on disk. On a TPU, which one
process has to itself, and on CPU, whose programs are tied to an instruction set that no key tells, there is none.
"""

import contextlib
import dataclasses
import functools
import importlib
import logging
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import IO, Any

import jax

from jaxserve import executables

logger = logging.getLogger(__name__)

END_S = 60.0  # for a process to end; it may be compiling what nobody wants any more


@contextlib.contextmanager
def compiler() -> Iterator[Callable]:
    """`executables.compiled`, with a process of its own where that helps. The process starts with the first program."""
    frozen = getattr(sys, "frozen", False) or not sys.executable  # there is no Python to start
    if jax.default_backend() != "gpu" or executables.kept_in() is None or frozen:
        yield executables.compiled
        return
    process = CompileProcess()
    try:
        yield functools.partial(executables.compiled, elsewhere=process.compile)
    finally:
        process.close()


class CompileProcess:
    """The other process, as seen from this one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._files = contextlib.ExitStack()
        self._errors: IO[bytes] | None = None  # what the process writes to stderr
        self._works = True

    def compile(self, function: Any, arguments: tuple, static: dict[str, Any]) -> bytes | None:
        """The serialised program; None, after a warning, where the process failed. Then it is not asked again."""
        if not self._works:
            return None
        job = (executables.setting(), function.__module__, function.__name__, _portable(arguments), static)
        try:
            answer = self._ask(pickle.dumps(job))
        except Exception as error:  # whatever: this process can do it
            answer = f"{error!r} {self._last_words()}"
        if isinstance(answer, bytes):
            return answer
        logger.warning("a process that compiles for a thread failed, and the thread goes on alone: %s", answer)
        self.close()
        return None

    def _ask(self, job: bytes) -> bytes | str:
        if self._process is None:
            self._errors = self._files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
            path = os.pathsep.join(filter(None, sys.path))
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "jaxserve.compile_process"],  # -P: nothing from the working directory
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C is for this process
                # The card's memory belongs to this process; the other one takes what it needs, which is little
                env=os.environ
                | {
                    "PYTHONPATH": path,
                    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
                    "JAX_ENABLE_COMPILATION_CACHE": "false",  # what comes from there does not serialise again
                },
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(job)
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)

    def _last_words(self) -> str:
        if self._errors is None:
            return ""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-500:]

    def close(self) -> None:
        self._works = False
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
                process.communicate(pickle.dumps(None), timeout=END_S)
            process.kill()  # no-op if it has ended
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # what it did not take is lost
                        pipe.close()
        self._files.close()


@dataclasses.dataclass(frozen=True)
class _Shape:
    """Of an array; `placed` arrays are on the first device of whoever reads this."""

    shape: tuple[int, ...]
    dtype: Any
    placed: bool


def _portable(arguments: tuple) -> tuple:
    if any(device != jax.devices()[0] for device in executables._devices(arguments)):
        raise ValueError("the arguments are not on the first device")

    def portable(leaf: Any) -> Any:
        is_array = isinstance(leaf, jax.ShapeDtypeStruct)
        return _Shape(leaf.shape, leaf.dtype, leaf.sharding is not None) if is_array else leaf

    return jax.tree.map(portable, arguments)


def _here(arguments: tuple) -> tuple:
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def here(leaf: Any) -> Any:
        if not isinstance(leaf, _Shape):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place if leaf.placed else None)

    return jax.tree.map(here, arguments)


def serve() -> None:
    """The other process: answers each job with a program or with what went wrong, and ends with None."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whoever prints does not print into the answers
    while (job := pickle.load(sys.stdin.buffer)) is not None:
        setting, module, name, arguments, static = job
        try:
            answer: bytes | str = "it would compile something else: its code, versions, device or settings differ"
            if setting == executables.setting():
                function = getattr(importlib.import_module(module), name)
                answer = executables.serialized(executables.compile_here(function, _here(arguments), static))
        except Exception as error:  # all of them are for the other side
            answer = repr(error)
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    # What is pickled belongs to the module by its name, not to the one that runs
    importlib.import_module("jaxserve.compile_process").serve()
