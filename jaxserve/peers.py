"""The connections between processes that run one engine: messages, signs of life, and the news of a death.

Whoever ends, hangs or cannot be reached is dead to the others: its connection ends, or it is silent for `SILENCE_S`.
The first death is kept in a `Death`, which the main thread asks. A main thread that is stuck in a call, say in a
collective that waits for the dead, cannot ask: after `GRACE_S` its process is cut off. So nobody waits for ever.
"""

import atexit
import contextlib
import hmac
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from jaxserve.exceptions import EngineDeadError

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
SILENCE_S = 20.0  # of a process that sends no heartbeats, or takes no messages
START_S = 60.0  # for all processes to connect, once all have met
GRACE_S = 10.0  # from a death, or from the end after one, until this process is cut off
MAX_BYTES = 1 << 28  # of a message
TOKEN_BYTES = 32


_all: list["Death"] = []


class Death:
    """What this process knows of the end of others. Use from any thread, `check` from the main one."""

    def __init__(self) -> None:
        self._lock, self._known, self._expected = threading.Lock(), threading.Event(), False
        self._timer: threading.Timer | None = None
        self.reason: str | None = None
        self.mourners: list[object] = []  # what may wait for the dead: freeing it would wait too, so it is kept

    def expect(self) -> None:
        """From now on ends of connections are no deaths."""
        with self._lock:
            self._expected = True

    def report(self, reason: str) -> None:
        with self._lock:
            if self._expected or self.reason is not None:
                return
            self.reason = reason
            _all.append(self)
            self._timer = threading.Timer(GRACE_S, _cut_off, [reason])
            self._timer.daemon = True
            self._timer.start()
        print(
            f"jaxserve: {reason}", file=sys.stderr, flush=True
        )  # JAX may end this process before it comes to an error
        atexit.register(_leave_for_sure)
        self._known.set()

    def wait(self, timeout_s: float) -> None:
        """Until a death is known; at most so long."""
        self._known.wait(timeout_s)

    def check(self) -> None:
        """Raises EngineDeadError after a death."""
        if self.reason is not None:
            assert self._timer is not None
            self._timer.cancel()
            raise EngineDeadError(self.reason)


def _cut_off(reason: str) -> None:
    print(f"jaxserve: this process cannot go on and is ended, since {reason}", file=sys.stderr, flush=True)
    os._exit(1)


@contextlib.contextmanager
def at_most(seconds: float, reason: str) -> Iterator[None]:
    """Cuts this process off when what is inside takes longer."""
    timer = threading.Timer(seconds, _cut_off, [reason])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _leave_for_sure() -> None:
    """A device that waits for the dead must not hold up the interpreter's end."""
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(GRACE_S))


class Peer:
    """One connection. `on_message` is called in a thread of its own, with each message in order."""

    def __init__(self, name: str, connection: socket.socket, on_message: Callable[[bytes], object], death: Death):
        self.name, self._connection, self._on_message, self._death = name, connection, on_message, death
        connection.settimeout(SILENCE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sending = threading.Lock()
        self._receiver = threading.Thread(target=self._receive, name=f"from {name}", daemon=True)

    def start(self) -> None:
        self._receiver.start()

    def send(self, message: bytes) -> None:
        """An empty message is a sign of life. What cannot be sent is a death."""
        try:
            with self._sending:
                self._connection.sendall(len(message).to_bytes(4, "little") + message)
        except TimeoutError:
            self._death.report(f"{self.name} has taken no message for {SILENCE_S:g} s")
        except OSError as error:
            self._death.wait(1.0)  # the receiver may know more
            self._death.report(f"{self.name} is gone: {error}")

    def _receive(self) -> None:
        try:
            while True:
                size = int.from_bytes(read(self._connection, 4), "little")
                if size > MAX_BYTES:
                    raise OSError(f"a message of {size} bytes")
                if size:
                    self._on_message(read(self._connection, size))
        except TimeoutError:
            self._death.report(f"{self.name} has been silent for {SILENCE_S:g} s")
        except OSError as error:
            self._death.report(f"{self.name} is gone: {error}")

    def wait_for_end(self, timeout_s: float) -> None:
        """Until the other side has closed the connection; at most so long."""
        self._receiver.join(timeout_s)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class Heart:
    """Sends signs of life to all peers, until `stop`."""

    def __init__(self, peers: Iterable[Peer]):
        self._peers, self._stopped = tuple(peers), threading.Event()
        threading.Thread(target=self._beat, name="heart", daemon=True).start()

    def _beat(self) -> None:
        while not self._stopped.wait(HEARTBEAT_S):
            for peer in self._peers:
                peer.send(b"")

    def stop(self) -> None:
        self._stopped.set()


def read(connection: socket.socket, size: int) -> bytes:
    """Raises OSError when the connection ends first."""
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("its connection ended")
        data += part
    return bytes(data)


def accept(server: socket.socket, token: bytes, count: int) -> dict[int, socket.socket]:
    """The connections of processes 1 to `count`, by their number. Whoever does not know the token is sent away.

    Raises:
        EngineDeadError: not all have come in `START_S`.
    """
    found: dict[int, socket.socket] = {}
    deadline = time.monotonic() + START_S
    while len(found) < count:
        server.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            connection, address = server.accept()
        except TimeoutError as error:
            missing = sorted(set(range(1, count + 1)) - set(found))
            raise EngineDeadError(f"processes {missing} have not connected to process 0 in {START_S:g} s") from error
        try:
            connection.settimeout(5.0)
            if not hmac.compare_digest(read(connection, TOKEN_BYTES), token):
                raise ConnectionError("it does not know the token")
            found[int.from_bytes(read(connection, 4), "little")] = connection
        except OSError as error:
            logger.warning("a connection from %s was refused: %s", address, error)
            connection.close()
    return found


def connect(host: str, port: int, token: bytes, process: int) -> socket.socket:
    """As process `process`, to process 0.

    Raises:
        EngineDeadError: it cannot be reached.
    """
    try:
        connection = socket.create_connection((host, port), timeout=START_S)
        connection.sendall(token + process.to_bytes(4, "little"))
    except OSError as error:
        raise EngineDeadError(f"process 0 cannot be reached at {host}, port {port}: {error}") from error
    return connection
