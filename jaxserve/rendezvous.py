"""Where several processes meet before JAX connects them: it ends a process that misses another one, and says little."""

import contextlib
import socket
import time

from jaxserve.exceptions import EngineDeadError

HELLO = "jaxserve {process_id} of {num_processes}\n"
GO = "go"
MAX_LINE = 256
LINE_S = 2.0  # to say hello once connected
RETRY_S = 0.2


def meet(address: str, num_processes: int, process_id: int, timeout_s: float) -> None:
    """Returns in all processes when all are there. Process 0 listens at `address`, which is free again then.

    Raises:
        ValueError: the address cannot be listened at, or what this process is does not go with the others.
        EngineDeadError: somebody has not come in time.
    """
    host, _, port = address.rpartition(":")
    place, deadline = (host.strip("[]"), int(port)), time.monotonic() + timeout_s
    if process_id > 0:
        return _come(place, HELLO.format(process_id=process_id, num_processes=num_processes), deadline, timeout_s)
    try:
        family = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)[0][0]
        server = socket.create_server(place, family=family)
    except OSError as error:
        raise ValueError(
            f"coordinator_address must be an address of this host, which is that of process 0, and a free port; at "
            f"{address}: {error.strerror}"
        ) from error
    with server, contextlib.ExitStack() as connections:
        came = _receive(server, num_processes, deadline, connections)
        if missing := sorted({*range(1, num_processes)} - came.keys()):
            raise EngineDeadError(
                f"{len(came) + 1} of {num_processes} processes have come to {address} in {timeout_s:g} s; missing: "
                + ", ".join(map(str, missing))
            )
        for number, connection in came.items():
            try:
                connection.sendall(f"{GO}\n".encode())
                connection.recv(1)  # it closes first, so that the address is free at once
            except OSError as error:
                raise EngineDeadError(f"process {number} came and left: {error}") from error


def _receive(
    server: socket.socket, num_processes: int, deadline: float, connections: contextlib.ExitStack
) -> dict[int, socket.socket]:
    """Who has come in time, by number."""
    came: dict[int, socket.socket] = {}
    hellos = {HELLO.format(process_id=i, num_processes=num_processes): i for i in range(1, num_processes)}
    while len(came) < num_processes - 1 and (left := deadline - time.monotonic()) > 0:
        server.settimeout(min(left, 1.0))
        try:
            connection = connections.enter_context(server.accept()[0])
            connection.settimeout(LINE_S)
            hello = _line(connection)
            if (number := hellos.get(f"{hello}\n")) is not None and number not in came:
                came[number] = connection
            elif number is not None:
                _refuse(connection, f"process_id {number} is taken: each process needs its own")
            elif hello.startswith("jaxserve "):
                _refuse(connection, f"process 0 was started with num_processes {num_processes}, this is {hello[9:]}")
            else:
                connection.close()  # somebody else
        except OSError:
            continue
    return came


def _refuse(connection: socket.socket, reason: str) -> None:
    connection.sendall(f"{reason}\n".encode())
    connection.close()


def _come(place: tuple[str, int], hello: str, deadline: float, timeout_s: float) -> None:
    reached = False
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(OSError), socket.create_connection(place, timeout=min(left, LINE_S)) as connection:
            reached = True
            connection.sendall(hello.encode())
            connection.settimeout(max(deadline - time.monotonic(), RETRY_S))
            if (answer := _line(connection)) == GO:
                return
            if answer:
                raise ValueError(answer)
        time.sleep(RETRY_S)
    what = "has not called all together" if reached else "cannot be reached"
    raise EngineDeadError(f"process 0 {what} at {place[0]}:{place[1]} in {timeout_s:g} s")


def _line(connection: socket.socket) -> str:
    """Up to the end of a line; empty if the other one closes before."""
    data = b""
    while not data.endswith(b"\n"):
        if len(data) > MAX_LINE or not (some := connection.recv(MAX_LINE)):
            return ""
        data += some
    return data.decode(errors="replace").strip()
