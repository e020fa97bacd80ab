"""Compiled step programs by key: compiled ahead of the step that needs them, never in silence inside one.

How this works: a key is a shape. `get(key)` returns the program of that shape if it is ready; else the smallest ready
one that covers it, while the exact one compiles in the background; else it compiles now and the step waits. A wait
after warm-up is a defect and is counted and logged.
"""

import contextlib
import functools
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Protocol

logger = logging.getLogger(__name__)


class Key(Protocol):
    """A shape that a program is compiled for. Hashable."""

    def covers(self, other, /) -> bool: ...

    @property
    def cost(self) -> int: ...


class Compiler:
    """Background threads shared by all program tables.

    They end with the compiler, by `close()`, garbage collection or at exit: the interpreter must not end in a compile.
    A job is called with what `context` yields, which may not fail; each thread is inside it from its first job until
    none is left.
    """

    def __init__(self, num_threads: int, context: Callable[[], AbstractContextManager]):
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        threads = [threading.Thread(target=_work, args=(self._jobs, context), daemon=True) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        self.close = weakref.finalize(self, _end, self._jobs, threads)

    def submit(self, job: Callable[[Any], object]) -> Future:
        future: Future = Future()
        self._jobs.put((job, future))
        return future


def _end(jobs: queue.SimpleQueue, threads: list[threading.Thread]) -> None:
    with contextlib.suppress(queue.Empty):
        while True:  # what has not started never will
            jobs.get_nowait()
    for _ in threads:
        jobs.put((None, None))
    for thread in threads:
        thread.join()


def _work(jobs: queue.SimpleQueue, context: Callable[[], AbstractContextManager]) -> None:
    while True:
        job, future = jobs.get()
        if job is None:
            return
        with context() as tool, contextlib.suppress(queue.Empty):
            while job is not None:
                _do(job, tool, future)
                del job, future  # a waiting thread must not keep the programs' owner alive
                job, future = jobs.get_nowait()
            return


def _do(job: Callable[[Any], object], tool: Any, future: Future) -> None:
    future.set_running_or_notify_cancel()
    try:
        future.set_result(job(tool))
    except BaseException as error:  # handed to whoever waits; where nobody does, the log has it
        logger.warning("a background compile failed", exc_info=error)
        future.set_exception(error)


class Programs[K: Key]:
    """The programs of one function.

    Args:
        build: makes the program of a key with a way to compile: `compiled`, or what the compiler's context yields.
        announce: is told of keys before they are compiled.
    """

    def __init__(
        self,
        name: str,
        build: Callable[[K, Any], Callable],
        compiler: Compiler,
        compiled: Any,
        announce: Callable[[str, list[K]], object] = lambda name, keys: None,
    ):
        self.name, self._build, self._compiler, self._compiled = name, build, compiler, compiled
        self._announce = announce
        self._ready: dict[K, Callable] = {}
        self._pending: dict[K, Future] = {}
        self.warm = False
        self.num_stalls = 0
        self.compile_s = 0.0

    def get(self, key: K) -> tuple[K, Callable]:
        """The program to run for `key` and the key it was compiled for, which covers `key`."""
        if key in self._ready:
            return key, self._ready[key]
        fallback = min((k for k in list(self._ready) if k.covers(key)), key=lambda k: k.cost, default=None)
        if fallback is not None:
            self.request([key])
            return fallback, self._ready[fallback]
        self._announce(self.name, [key])
        return key, self._wait(key)

    def exact(self, key: K) -> Callable:
        """The program of `key` itself; where it is not ready, this waits."""
        return self._ready.get(key) or self._wait(key)

    def is_ready(self, key: K) -> bool:
        """Whether the program of `key` itself is ready."""
        return key in self._ready

    @property
    def requested(self) -> list[Future]:
        """All that was ever asked for in the background."""
        return list(self._pending.values())

    def request(self, keys: Iterable[K]) -> list[Future]:
        """Starts to compile, in the background, what is neither ready nor on its way."""
        futures, keys = [], list(keys)
        new = [key for key in keys if key not in self._pending and key not in self._ready]
        if new:
            self._announce(self.name, new)
        for key in keys:
            if key not in self._pending:
                self._pending[key] = self._compiler.submit(functools.partial(self._compile, key))
            futures.append(self._pending[key])
        return futures

    def clear(self) -> None:
        """Lets go of all programs."""
        self._ready.clear()

    def _wait(self, key: K) -> Callable:
        start = time.monotonic()
        if key in self._pending and self._pending[key].running():
            self._pending[key].result()
        else:
            self._compile(key, self._compiled)  # here and now: no queue to wait in
        if self.warm:
            self.num_stalls += 1
            logger.warning("a step waited %.2f s for %s %s after warm-up", time.monotonic() - start, self.name, key)
        return self._ready[key]

    def _compile(self, key: K, compiled: Any) -> None:
        if key in self._ready:  # a step could not wait for its turn in the warm-up
            return
        start = time.monotonic()
        self._ready[key] = self._build(key, compiled)
        elapsed = time.monotonic() - start
        self.compile_s += elapsed
        logger.debug("%s %s ready after %.2f s", self.name, key, elapsed)
