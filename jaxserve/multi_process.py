"""One engine over the devices of several processes, one a host.

How this works. Each process has its devices, loads its share of the model and makes a `Device`; together they are one
mesh. Process 0 schedules and has the requests. Whatever its device is about to run (a method under
`on_all_processes`) it first tells the others, with the same numpy arrays, and they run the same programs in the same
order. Results are the same on all ranks, so nothing comes back. What decides about programs (which are ready, how large
the cache is) is decided by process 0.

Processes meet through `jax.distributed`; then they talk over TCP (peers.py), since a message between hosts must not
wait for their devices.
"""

import contextlib
import functools
import json
import queue
import secrets
import socket
import threading
import time
import typing
from collections.abc import Callable, Iterable
from typing import Any

import jax
import msgspec
import numpy as np
from jax.experimental import multihost_utils

from jaxserve import rendezvous
from jaxserve.config import EngineConfig, ParallelOptions, RunnerConfig
from jaxserve.exceptions import EngineDeadError
from jaxserve.executables import code_and_versions
from jaxserve.peers import TOKEN_BYTES, Death, Heart, Peer, accept, at_most, connect

MEET_S = 300.0  # for all processes to come, and then to the first collective, which waits for them
CLOSE_S = 10.0  # for the other processes to end with process 0
POLL_S = 5e-5  # between two looks at results that are on their way
NOTE_BYTES = 512
READY = b"\0"

# What the methods under `on_all_processes` take, by name
_TAKES: dict[str, msgspec.msgpack.Decoder] = {}


def on_all_processes[**P, R](method: Callable[P, R]) -> Callable[P, R]:
    """A method that every process runs when process 0 does. Of an object with `leader`, None where there is none else.

    Arguments are positional, and what they are annotated with: plain values, dataclasses and numpy arrays.
    """
    hints = typing.get_type_hints(method)
    hints.pop("return", None)
    arguments: Any = tuple.__class_getitem__(tuple(hints.values()))
    _TAKES[method.__name__] = msgspec.msgpack.Decoder(arguments, dec_hook=_array_from)

    @functools.wraps(method)
    def run(self, *arguments):
        if self.leader is not None:
            self.leader.tell(method.__name__, arguments)
        return method(self, *arguments)  # pyright: ignore[reportCallIssue]

    return run  # pyright: ignore[reportReturnType]


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"a {type(value).__name__} does not cross to other processes")


def _array_from(kind: type, value: Any) -> Any:
    assert kind is np.ndarray
    dtype, shape, data = value
    return np.frombuffer(data, dtype).reshape(shape)


_ENCODE = msgspec.msgpack.Encoder(enc_hook=_plain).encode


class Message(msgspec.Struct, array_like=True, tag=True):
    """From process 0: run this. Without a method it is the end, for a reason if that is a bad one."""

    method: str = ""
    arguments: msgspec.Raw = msgspec.Raw(b"\x90")
    reason: str = ""


class Terms(msgspec.Struct, array_like=True, tag=True):
    """The first message of process 0."""

    described: dict[str, str]  # what must be the same in all processes
    runner: RunnerConfig


_met: list[bool] = []  # in this process

_DECODE = msgspec.msgpack.Decoder(Terms | Message).decode


class Leader:
    """Process 0's hold on the others."""

    def __init__(self, connections: dict[int, socket.socket]):
        self._death, self._ready = Death(), threading.Semaphore(0)
        self._peers = [
            Peer(f"process {i}", connection, functools.partial(self._hear, i), self._death)
            for i, connection in sorted(connections.items())
        ]
        for peer in self._peers:
            peer.start()
        self._heart = Heart(self._peers)
        self._closed = False

    def _hear(self, process: int, message: bytes) -> None:
        """A follower says that it is ready, and why it ends."""
        if message == READY:
            self._ready.release()
        else:
            self._death.report(f"process {process} has ended: {message.decode(errors='replace')}")

    def agree(self, config: EngineConfig, model: Any, runner: RunnerConfig) -> None:
        """Tells the others the sizes to take, and by what they can see that they were started alike."""
        self._send(_ENCODE(Terms(described(config, model), runner)))

    def wait(self) -> None:
        """Until all others have their model on their devices. Raises EngineDeadError when one has died."""
        for _ in self._peers:
            while not self._ready.acquire(timeout=0.1):
                self._death.check()

    def tell(self, method: str, arguments: tuple) -> None:
        """Raises EngineDeadError when a process has died."""
        self._send(_ENCODE(Message(method, msgspec.Raw(_ENCODE(arguments)))))

    def _send(self, message: bytes) -> None:
        for peer in self._peers:
            peer.send(message)
        self._death.check()

    def hold(self, device: object) -> None:
        """Once a process has died, nothing of `device` is freed any more."""
        self._death.mourners.append(device)

    def check(self) -> None:
        """Raises EngineDeadError when a process has died."""
        self._death.check()

    @property
    def has_lost(self) -> bool:
        """Whether a process has died."""
        return self._death.reason is not None

    def read[T](self, arrays: Iterable[Any], function: Callable[[], T]) -> T:
        """`function()`, which reads these arrays, once they are ready.

        Raises:
            EngineDeadError: a process died meanwhile; without it they may never be ready.
        """
        for array in arrays:
            while array is not None and not array.is_ready():
                self._death.check()
                time.sleep(POLL_S)
        try:
            return function()
        except jax.errors.JaxRuntimeError:
            self._death.wait(1.0)  # if that is why, the news are on their way
            self._death.check()
            raise

    def close(self, reason: str = "") -> None:
        """Ends the other processes: with an error if there is a reason, or one of them has died."""
        if self._closed:
            return
        self._closed = True
        reason = reason or self._death.reason or ""
        self._death.expect()
        self._heart.stop()
        for peer in self._peers:
            peer.send(_ENCODE(Message(reason=reason)))
        end = time.monotonic() + CLOSE_S
        for peer in self._peers:
            peer.wait_for_end(max(0.0, end - time.monotonic()) if self._death.reason is None else 0.0)
            peer.close()


class Follower:
    """What another process than 0 does."""

    def __init__(self, connection: socket.socket):
        self._death = Death()
        self._inbox: queue.SimpleQueue[Terms | Message] = queue.SimpleQueue()
        self._peer = Peer("process 0", connection, self._hear, self._death)
        self._peer.start()
        self._heart = Heart([self._peer])

    def agree(self, config: EngineConfig, model: Any) -> RunnerConfig:
        """The sizes that process 0 takes.

        Raises:
            EngineDeadError: process 0 has ended.
            ValueError: this process was started otherwise; the message tells how.
        """
        theirs = self._next()
        if isinstance(theirs, Message):
            raise EngineDeadError(f"process 0 has ended: {theirs.reason}")
        ours = described(config, model)
        different = [
            f"{name} is {ours.get(name)}, not {theirs.described.get(name)}"
            for name in sorted(ours | theirs.described)
            if ours.get(name) != theirs.described.get(name)
        ]
        if different:
            raise ValueError(f"all processes must be started alike, but on this one {'; '.join(different)}")
        return theirs.runner

    def follow(self, target: Any) -> None:
        """Runs the methods of `target` that process 0 runs of its own, until it ends.

        Raises:
            EngineDeadError: a process has died, or cannot be reached.
        """
        self._death.mourners.append(target)
        self._peer.send(READY)
        while True:
            message = self._next()
            assert isinstance(message, Message)
            if not message.method:
                if message.reason:
                    raise EngineDeadError(f"process 0 has ended: {message.reason}")
                return
            try:
                getattr(target, message.method)(*_TAKES[message.method].decode(message.arguments))
            except Exception:
                self._death.wait(1.0)
                self._death.check()
                raise

    def _hear(self, data: bytes) -> None:
        message = _DECODE(data)
        if isinstance(message, Message) and not message.method:
            self._death.expect()
        self._inbox.put(message)

    def _next(self) -> Terms | Message:
        while True:
            with contextlib.suppress(queue.Empty):
                return self._inbox.get(timeout=0.1)
            self._death.check()

    def close(self, reason: str = "") -> None:
        """Leaves process 0, which cannot go on then. It hears the reason."""
        self._death.expect()
        self._heart.stop()
        if reason:
            self._peer.send(reason.encode())
        self._peer.close()


def join(options: ParallelOptions) -> Leader | Follower | None:
    """Meets the other processes; None where this is the only one.

    Raises:
        EngineDeadError: not all have come.
        ValueError: these are not the processes that belong together, or an engine of several processes was here before:
            the others have ended with it.
    """
    address = options.coordinator_address
    if address is not None and not jax.distributed.is_initialized():
        jax.config.update("jax_enable_recoverability", True)  # else JAX aborts this process when another one has died
        jax.config.update("jax_enable_preemption_service", False)  # else JAX keeps SIGTERM for itself
        if address == "auto":
            jax.distributed.initialize()
        else:
            assert options.num_processes is not None
            assert options.process_id is not None
            rendezvous.meet(address, options.num_processes, options.process_id, MEET_S)
            jax.distributed.initialize(address, options.num_processes, options.process_id)
    if jax.process_count() == 1:
        return None
    if _met:
        raise ValueError("several processes make one engine once; start them all again for another one")
    _met.append(True)
    try:
        with at_most(MEET_S, f"the processes have not met in {MEET_S:g} s"):
            return _meet(address)
    except jax.errors.JaxRuntimeError as error:
        raise EngineDeadError(f"the processes have not met: {error}") from error


def _meet(address: str | None) -> Leader | Follower:
    if jax.process_index() > 0:
        note = json.loads(_broadcast(b""))
        return Follower(connect(note["host"], note["port"], bytes.fromhex(note["token"]), jax.process_index()))
    host = _own_address() if address in (None, "auto") else address.rpartition(":")[0].strip("[]")
    token = secrets.token_bytes(TOKEN_BYTES)
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
        _broadcast(json.dumps({"host": host, "port": server.getsockname()[1], "token": token.hex()}).encode())
        return Leader(accept(server, token, jax.process_count() - 1))


def _broadcast(note: bytes) -> bytes:
    """Process 0's note; the devices carry it."""
    padded = np.frombuffer(note.ljust(NOTE_BYTES), np.uint8).astype(np.int32)
    return np.asarray(multihost_utils.broadcast_one_to_all(padded)).astype(np.uint8).tobytes().rstrip()


def _own_address() -> str:
    """The one that this host has towards others; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # any address beyond this network
            return probe.getsockname()[0]
        except OSError:
            return socket.gethostbyname(socket.gethostname())


def described(config: EngineConfig, model: Any) -> dict[str, str]:
    """What must be the same in all processes. Where the model lies may differ, but not its shape."""
    options = config.model
    names = ("dtype", "quantization", "load_format", "seed")
    parallel = config.parallel
    return {name: repr(getattr(options, name)) for name in names} | {
        "kv_cache_dtype": repr(config.cache.kv_cache_dtype),
        "tensor_parallel_size": repr(parallel.tensor_parallel_size),
        "kv_parallel_size": repr(parallel.kv_parallel_size),
        "model": repr(model.config),
        "sparse_attention": repr(model.sparse),
        "software": repr(code_and_versions()),
    }
