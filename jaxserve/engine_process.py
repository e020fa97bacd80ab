"""The engine's child process: what it runs, and the parent's handle on it.

How this works. The child owns the device, the scheduler and the step loop; it sees token ids only. One message a step
(engine_messages.py) goes each way: new requests, aborts and questions in; tokens, rejections and answers out. Nothing
is pickled after start-up. A reader thread drains the pipe at once, so the parent never waits for a long step; an idle
child sleeps in `queue.get`. The end of the pipe (the parent closed it, or died) ends the child.
"""

import logging
import multiprocessing
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from jaxserve.core_types import CoreOutput, CoreRequest
from jaxserve.engine_messages import Answer, Facts, FromEngine, Rejection, ToEngine, TokenizerFacts
from jaxserve.exceptions import EngineDeadError, QueueFullError, RequestError

if TYPE_CHECKING:
    from jaxserve.config import EngineConfig

logger = logging.getLogger(__name__)

IDLE_LOOK_S = 1.0  # between two looks of an idle child at what else may have ended its engine
EXIT_GRACE_S = 5.0  # after the pipe's end: time for a clean exit before the process is cut off (a long compile)


class Core(Protocol):
    """What the child needs of `EngineCore`."""

    def add_request(self, request: CoreRequest, /) -> None: ...
    def finish(self, seq_ids: list[int], reason: str, stop_reason: str | None = None, /) -> list[CoreOutput]: ...
    def step(self) -> list[CoreOutput]: ...
    def has_unfinished(self) -> bool: ...
    def close(self) -> None: ...


type CoreFactory = Callable[[Any], tuple[Core, Facts]]  # of the config; importable, it crosses to the child by name


# ------------------------------------------------------------------------------------------------ the child's side


def start_core(config: "EngineConfig") -> tuple[Core, Facts]:
    """The `CoreFactory` of real models: loads what `config` names."""
    from jaxserve import engine  # the parent does without weights and runner

    loaded, core = engine.start_core(config)
    limits = core.limits()
    return core, Facts(
        tokenizer=None if loaded.tokenizer is None else TokenizerFacts.of(loaded.tokenizer),
        vocab_size=limits.vocab_size,
        max_model_len=limits.max_model_len,
        max_logprobs=limits.max_logprobs,
        generation_config=loaded.generation_config,
        seed=config.model.seed,
    )


type Inbox = queue.SimpleQueue[ToEngine | Exception | None]  # None: the pipe ended


def _main(connection: Connection, factory: CoreFactory, config: Any) -> None:
    """The child's target: load, report, then step until the pipe ends or something breaks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=_drain, args=(connection, inbox), name="engine-inbox", daemon=True).start()
    encoder = msgspec.msgpack.Encoder()
    try:
        core, facts = factory(config)
        connection.send_bytes(encoder.encode(FromEngine(facts=facts)))
        _loop(core, inbox, lambda message: connection.send_bytes(encoder.encode(message)))
        core.close()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the parent is gone, nobody is left to tell
    except Exception as error:
        traceback.print_exc()
        _tell_death(connection, encoder.encode(FromEngine(death=f"{type(error).__name__}: {error}")))


def _drain(connection: Connection, inbox: Inbox) -> None:
    decoder = msgspec.msgpack.Decoder(ToEngine)
    try:
        while True:
            inbox.put(decoder.decode(connection.recv_bytes()))
    except (EOFError, OSError):
        inbox.put(None)
    except Exception as error:
        inbox.put(error)
    time.sleep(EXIT_GRACE_S)  # ends early when the main thread returns and the interpreter goes
    os._exit(1)


def _tell_death(connection: Connection, message: bytes) -> None:
    try:
        connection.send_bytes(message)
    except OSError:
        logger.debug("the parent left before the engine's last message")


def _loop(core: Core, inbox: Inbox, send: Callable[[FromEngine], None]) -> None:
    while True:
        reply = FromEngine(rejections=[], answers=[])
        idle = not core.has_unfinished()
        while idle or not inbox.empty():
            try:
                message = inbox.get(timeout=IDLE_LOOK_S)  # sleeps when idle
            except queue.Empty:
                idle = not core.has_unfinished()
                continue
            if message is None:
                return
            if isinstance(message, Exception):
                raise message
            _obey(core, message, reply)
            idle = False
        if core.has_unfinished():
            reply.outputs = core.step()
        if reply.outputs or reply.rejections or reply.answers:
            send(reply)


def _obey(core: Core, message: ToEngine, reply: FromEngine) -> None:
    for group in message.groups:
        added: list[int] = []
        try:
            for sequence in group.sequences():
                core.add_request(sequence)
                added.append(sequence.seq_id)
        except RequestError as error:
            core.finish(added, "abort")
            full = isinstance(error, QueueFullError)
            reply.rejections.append(Rejection(group.request_id, group.seq_id, str(error), full))
    core.finish(message.aborts, "abort")
    for seq_id, stop in message.stops:
        core.finish([seq_id], "stop", stop)
    for question in message.questions:
        try:
            value = msgspec.to_builtins(getattr(core, question.method)(*question.arguments))
            reply.answers.append(Answer(question.number, value))
        except RequestError as error:
            reply.answers.append(Answer(question.number, error=str(error)))


# ----------------------------------------------------------------------------------------------- the parent's side


class EngineProcess:
    """The parent's handle on the child. Use from one thread; `receive` blocks unless `fileno()` is readable.

    Raises:
        EngineDeadError: the child ended before its model was loaded; the message says why.
        SystemExit: the child followed process 0 of several, which has ended.
    """

    def __init__(self, factory: CoreFactory, config: Any):
        context = multiprocessing.get_context("spawn")  # JAX's threads do not survive a fork
        self._connection, theirs = context.Pipe()
        self._process: SpawnProcess = context.Process(
            target=_main, args=(theirs, factory, config), name="jaxserve-engine", daemon=True
        )
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        try:
            self._process.start()
        except BaseException:
            self._connection.close()
            raise
        finally:
            theirs.close()  # so that the child's death is the end of our pipe
        self.pid = self._process.pid
        self.facts = self._wait_for_start()

    def _wait_for_start(self) -> Facts:
        try:
            message = self.receive()
        except EngineDeadError as error:
            ended_well = self._process.exitcode == 0  # a follower: see multi_process.py
            self.close()
            if ended_well:
                raise SystemExit(0) from None
            hint = 'see its stderr; a script must guard its calls by `if __name__ == "__main__":`'
            raise EngineDeadError(f"the engine could not start: {error} ({hint})") from error
        except BaseException:  # KeyboardInterrupt: a load can be long
            self.close()
            raise
        if message.facts is None:
            self.close()
            raise EngineDeadError(f"the engine could not start: {message.death}")
        return message.facts

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: ToEngine) -> None:
        """Raises EngineDeadError when the child is gone."""
        try:
            self._connection.send_bytes(self._encoder.encode(message))
        except OSError as error:
            raise EngineDeadError(self.epitaph()) from error

    def receive(self) -> FromEngine:
        """The next message. Raises EngineDeadError at the end of the pipe."""
        try:
            return self._decoder.decode(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise EngineDeadError(self.epitaph()) from error

    def has_message(self) -> bool:
        """`receive` would not block."""
        return not self._connection.closed and self._connection.poll()

    def is_alive(self) -> bool:
        return not self._connection.closed and self._process.is_alive()

    def epitaph(self) -> str:
        """How the child ended, in words."""
        self._process.join(1.0)
        code = self._process.exitcode
        if code is None:
            return "the engine process closed its pipe"
        if code < 0:
            return f"the engine process was killed by {signal.Signals(-code).name}"
        return f"the engine process ended with exit code {code}"

    def close(self, timeout: float = 10.0) -> None:
        """Ends the child: first by closing the pipe, after `timeout` seconds by force. No zombie stays behind."""
        if self._connection.closed:
            return
        self._connection.close()
        self._process.join(timeout)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(1.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()
