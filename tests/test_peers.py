"""Connections between processes: who ends or falls silent is noticed, and nobody waits for ever."""

import queue
import signal
import socket
import subprocess
import sys

import pytest

from jaxserve import EngineDeadError, peers
from jaxserve.peers import TOKEN_BYTES, Death, Heart, Peer, accept, connect


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(peers, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(peers, "SILENCE_S", 0.3)
    for name in ("_cut_off", "_leave_for_sure"):  # this process is to go on
        monkeypatch.setattr(peers, name, lambda *_: None)


@pytest.fixture
def pair():
    """A peer, the messages that it got, its knowledge of deaths, and the other end of its connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
    death, messages = Death(), queue.SimpleQueue()
    peer = Peer("process 1", ours, messages.put, death)
    peer.start()
    yield peer, messages, death, theirs
    death.expect()
    theirs.close()
    peer.close()
    peer.wait_for_end(5.0)


def told(death: Death) -> str:
    death.wait(5.0)
    with pytest.raises(EngineDeadError) as caught:
        death.check()
    return str(caught.value)


def test_messages_come_in_order_and_signs_of_life_are_none(pair):
    peer, messages, death, theirs = pair
    other_death, answers = Death(), queue.SimpleQueue()
    other = Peer("process 0", theirs, answers.put, other_death)
    other.start()
    hearts = Heart([peer]), Heart([other])
    large = bytes(3_000_000)
    for message in (b"1", large, b"2"):
        other.send(message)
    assert [messages.get(timeout=5.0) for _ in range(3)] == [b"1", large, b"2"]
    death.wait(2 * peers.SILENCE_S)  # both live on their hearts alone
    assert (death.reason, other_death.reason, messages.empty()) == (None, None, True)
    for heart in hearts:
        heart.stop()
    other_death.expect()


def test_an_ended_connection_is_a_death(pair):
    _, _, death, theirs = pair
    theirs.close()
    assert told(death) == "process 1 is gone: its connection ended"


def test_silence_is_a_death(pair):
    assert told(pair[2]) == "process 1 has been silent for 0.3 s"


def test_a_process_that_takes_no_messages_is_dead(pair):
    peer, _, death, theirs = pair
    heart = Heart([Peer("process 0", theirs, print, Death())])  # it sends, and never reads
    peer.send(bytes(100_000_000))
    assert told(death) == "process 1 has taken no message for 0.3 s"
    heart.stop()


def test_nonsense_instead_of_messages_is_a_death(pair):
    pair[3].sendall(b"GET / HTTP/1.1\r\n")
    assert "a message of " in told(pair[2])


def test_an_expected_end_is_no_death(pair):
    peer, _, death, theirs = pair
    death.expect()
    theirs.close()
    peer.wait_for_end(5.0)
    assert death.reason is None


def test_strangers_are_sent_away(monkeypatch, caplog):
    token = bytes(range(TOKEN_BYTES))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        stranger = connect("127.0.0.1", port, bytes(TOKEN_BYTES), 1)
        friend = connect("127.0.0.1", port, token, 1)
        found = accept(server, token, 1)
        assert found[1].getpeername() == friend.getsockname()
        assert "it does not know the token" in caplog.text
        monkeypatch.setattr(peers, "START_S", 0.1)
        with pytest.raises(EngineDeadError, match=r"processes \[1\] have not connected to process 0 in 0.1 s"):
            accept(server, token, 1)
    for connection in (stranger, friend, found[1]):
        connection.close()
    with pytest.raises(EngineDeadError, match=f"process 0 cannot be reached at 127.0.0.1, port {port}: "):
        connect("127.0.0.1", port, token, 1)


def end_of(script: str) -> tuple[int, str]:
    code = f"import time\nfrom jaxserve import peers\npeers.GRACE_S, death = 1.0, peers.Death()\n{script}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    return done.returncode, done.stderr


def test_a_process_that_is_stuck_after_a_death_is_cut_off():
    code, err = end_of("death.report('process 1 is gone'); time.sleep(60)")
    assert (code, err.splitlines()) == (
        1,
        [
            "jaxserve: process 1 is gone",
            "jaxserve: this process cannot go on and is ended, since process 1 is gone",
        ],
    )


def test_what_takes_too_long_is_cut_off_and_nothing_else():
    within = "with peers.at_most(0.2, 'nobody came'): pass\ntime.sleep(0.5)"
    code, err = end_of(f"{within}\nwith peers.at_most(0.2, 'they have not met'): time.sleep(60)")
    assert (code, err) == (1, "jaxserve: this process cannot go on and is ended, since they have not met\n")


def test_a_process_that_heard_of_a_death_goes_on_but_its_end_is_not_held_up():
    stuck = "import atexit; atexit.register(time.sleep, 60)"
    heard = "try: death.check()\nexcept Exception: time.sleep(1.5); print('heard')"
    code, err = end_of(f"{stuck}\ndeath.report('process 1 is gone')\n{heard}")
    assert (code, err) == (-signal.SIGALRM, "jaxserve: process 1 is gone\n")
