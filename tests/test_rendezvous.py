"""Processes meet, here threads, and tell who or what is missing."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxserve import rendezvous
from jaxserve.exceptions import EngineDeadError

LONG_S = 30.0


@pytest.fixture
def address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def together():
    with ThreadPoolExecutor(8) as pool:
        yield lambda *calls: [pool.submit(rendezvous.meet, *call) for call in calls]


def listening(address):
    host, port = address.split(":")
    while True:
        try:
            return socket.create_connection((host, int(port)))
        except OSError:
            time.sleep(0.01)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_all_go_on_when_all_are_there_and_the_address_is_free_again(together, address, order):
    for _ in range(2):  # at once
        calls = []
        for i in order[:-1]:
            calls += together((address, 3, i, LONG_S))
        assert not any(call.done() for call in calls)
        for call in calls + together((address, 3, order[-1], LONG_S)):
            call.result(LONG_S)


def test_one_process_meets_itself(address):
    rendezvous.meet(address, 1, 0, LONG_S)


def test_who_is_missing_is_named(together, address):
    calls = together((address, 4, 0, 2.0), (address, 4, 2, 4.0))
    with pytest.raises(EngineDeadError, match=r"^2 of 4 processes have come to 127.* in 2 s; missing: 1, 3$"):
        calls[0].result(LONG_S)
    with pytest.raises(EngineDeadError, match=r"^process 0 has not called all together at 127.* in 4 s$"):
        calls[1].result(LONG_S)


def test_process_0_is_missing(address):
    with pytest.raises(EngineDeadError, match=r"^process 0 cannot be reached at 127.* in 0.5 s$"):
        rendezvous.meet(address, 2, 1, 0.5)


def test_the_address_is_taken_or_of_another_host(address):
    host, port = address.split(":")
    with (
        socket.create_server((host, int(port))),
        pytest.raises(ValueError, match=r"a free port; at .*: Address already"),
    ):
        rendezvous.meet(address, 2, 0, LONG_S)
    with pytest.raises(ValueError, match=r"an address of this host, .* at 192\.0\.2\.1:9: Cannot assign"):
        rendezvous.meet("192.0.2.1:9", 2, 0, LONG_S)
    with pytest.raises(ValueError, match=r"at no\.such\.host\.invalid:9: "):
        rendezvous.meet("no.such.host.invalid:9", 2, 0, LONG_S)


def test_who_does_not_belong_is_told_and_harms_nobody(together, address):
    (leader,) = together((address, 3, 0, LONG_S))
    with listening(address) as first:  # connected before the second that says the same
        first.sendall(rendezvous.HELLO.format(process_id=1, num_processes=3).encode())
        for stranger in (b"GET / HTTP/1.1\r\n\r\n", b"", b"\xff" * 1000, b"jaxserve 7 of 3\n"):
            with listening(address) as connection:
                connection.sendall(stranger)
        with pytest.raises(ValueError, match="process_id 1 is taken: each process needs its own"):
            rendezvous.meet(address, 3, 1, LONG_S)
        with pytest.raises(ValueError, match="process 0 was started with num_processes 3, this is 1 of 2"):
            rendezvous.meet(address, 2, 1, LONG_S)
        assert not leader.done()
        last = together((address, 3, 2, LONG_S))
        first.settimeout(LONG_S)
        assert first.makefile().readline() == f"{rendezvous.GO}\n"
    for call in [leader, *last]:
        call.result(LONG_S)


def test_a_stranger_that_says_nothing_does_not_hold_up_the_others(monkeypatch, together, address):
    monkeypatch.setattr(rendezvous, "LINE_S", 0.2)
    (leader,) = together((address, 2, 0, LONG_S))
    with listening(address):
        together((address, 2, 1, LONG_S))[0].result(LONG_S)
        leader.result(LONG_S)
