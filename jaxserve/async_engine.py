"""`AsyncLLM`: the engine behind an event loop, in a process of its own.

How this works. The child process (engine_process.py) steps over token ids; here, in the parent, prompts are tokenised
and checked, and each step's tokens become text. The loop reads the pipe as it becomes readable and puts what came into
one mailbox a request, from which that request's generator takes it. What a slow reader has not taken yet is merged, so
a mailbox never holds more than one output.
"""

import asyncio
import itertools
import logging
import operator
import os
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec

from jaxserve import tracing
from jaxserve.config import EngineConfig
from jaxserve.core_types import CoreOutput, CoreRequest
from jaxserve.engine_messages import FromEngine, Group, Question, ToEngine
from jaxserve.engine_process import CoreFactory, EngineProcess, start_core
from jaxserve.exceptions import EngineDeadError, RequestError
from jaxserve.input_processor import InputProcessor, Prompt, RequestLimits
from jaxserve.mailbox import Mailbox
from jaxserve.metrics import StepRecord
from jaxserve.output_processor import OutputProcessor
from jaxserve.outputs import RequestOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.structured import check_grammar
from jaxserve.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_MESSAGES_A_TURN = 64  # readers get their turn even behind an engine that never pauses


class AsyncLLM:
    """Serves many requests at once from an event loop; takes the options of `LLM`.

    The constructor returns when the model is loaded (from inside a loop, call it in a thread). A script needs the usual
    `if __name__ == "__main__":`, since the engine's process imports it. Belongs to one running event loop at a time.
    End it with `shutdown`; without that the engine still ends with this process.

    Raises:
        TypeError: an unknown option.
        EngineDeadError: the engine could not start; the message says why.
        SystemExit: with `coordinator_address`, in other processes than 0, which it serves until that one has ended.
    """

    def __init__(self, model: str, **options: Any):
        config = EngineConfig.of(model, **options)
        tracer = tracing.configured(config.runtime.otlp_traces_endpoint, model=model)
        self._start(start_core, config, tracer)

    @classmethod
    def over(cls, factory: CoreFactory, config: Any) -> "AsyncLLM":
        """An `AsyncLLM` over another token core: `factory(config)` is called in the child process."""
        self = cls.__new__(cls)
        self._start(factory, config, tracing.configured(None))
        return self

    def _start(self, factory: CoreFactory, config: Any, tracer: tracing.RequestTracer | None) -> None:
        self._process = EngineProcess(factory, config)
        facts = self._process.facts
        self._tokenizer = None if facts.tokenizer is None else facts.tokenizer.tokenizer()
        limits = RequestLimits(
            vocab_size=facts.vocab_size, max_model_len=facts.max_model_len, max_logprobs=facts.max_logprobs
        )
        self._inputs = InputProcessor(self._tokenizer, limits, facts.generation_config, seed=facts.seed)
        self._outputs = OutputProcessor(self._tokenizer, tracer)
        self._loop: asyncio.AbstractEventLoop | None = None  # the one that reads the pipe
        self._mailboxes: dict[str, Mailbox] = {}  # by request id
        self._answers: dict[int, asyncio.Future[Any]] = {}  # by number of the question
        self._numbers = itertools.count()
        self._outbox = ToEngine()
        self._flush_is_due = False
        self._cause_of_death: str | None = None

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        priority: int = 0,
        deadline: float | None = None,
        cache_salt: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Yields the request's outputs, as `output_kind` says, until one is `finished`.

        Closing the generator, or cancelling the task that awaits it, aborts the request.

        Args:
            sampling_params: None = the model's defaults.
            priority: lower goes first, under scheduling_policy="priority".
            deadline: seconds from now; a request that is not done by then ends with finish_reason "abort".
            cache_salt: requests share cached pages only with the same salt.
            trace_headers: may hold a W3C `traceparent`, below which the request's span goes.

        Raises:
            RequestError, ParameterError, TypeError: this request is bad, or its id is in use; no other is harmed.
            QueueFullError: too many requests wait; try again later.
            EngineDeadError: the engine ended, before or meanwhile.
        """
        now = time.monotonic()
        form = sampling_params.structured_outputs if isinstance(sampling_params, SamplingParams) else None
        if form is not None:
            await asyncio.to_thread(check_grammar, form)  # beside the loop; `process` then finds it done
        self._check_alive()
        self._attach(asyncio.get_running_loop())
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a str, got {type(request_id).__name__}")
        if request_id in self._mailboxes:
            raise RequestError(f"request id {request_id!r} is in use; give each running request an id of its own")
        sequences = self._inputs.process(
            prompt,
            sampling_params,
            now=now,
            priority=priority,
            deadline=deadline,
            cache_salt=cache_salt,
        )
        mailbox = self._submit(request_id, prompt, sequences, trace_headers)
        finished = False
        try:
            while not finished:
                output = await mailbox.take()
                finished = output.finished
                yield output
        finally:
            if self._mailboxes.get(request_id) is mailbox:
                self._abort(request_id)

    async def abort(self, request_id: str) -> None:
        """Ends a request early: its generator yields what there is, with finish_reason "abort". Unknown id: nothing."""
        if request_id in self._mailboxes:
            self._abort(request_id)

    async def check_health(self) -> None:
        """Raises EngineDeadError when the engine has ended."""
        self._check_alive()

    async def reset_prefix_cache(self) -> bool:
        """Forgets all cached prompts' pages; False when running requests still hold some."""
        return await self._ask("reset_prefix_cache")

    async def get_metrics(self) -> dict[str, float]:
        """The engine's counters, as `LLM.get_metrics` gives them."""
        return await self._ask("get_metrics")

    async def recent_steps(self, since: int = 0) -> list[StepRecord]:
        """Records of the engine's last steps (at most 512), oldest first; only of those after step number `since`."""
        return msgspec.convert(await self._ask("recent_steps", operator.index(since)), list[StepRecord])

    async def start_profile(self, directory: str | os.PathLike[str]) -> None:
        """Starts a JAX profiler trace of the engine's process, which `stop_profile` writes into `directory`.

        Raises:
            RequestError: the directory cannot be made, or a profile runs already; the engine goes on.
        """
        await self._ask("start_profile", os.path.abspath(directory))

    async def stop_profile(self) -> None:
        """Ends the profile and writes it, which holds the engine up. Raises RequestError when none runs."""
        await self._ask("stop_profile")

    async def get_tokenizer(self) -> Tokenizer:
        """Raises ValueError for a model without one."""
        if self._tokenizer is None:
            raise ValueError("this model has no tokenizer")
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `sampling_params=None` means for this model."""
        return self._inputs.default_sampling_params

    @property
    def limits(self) -> RequestLimits:
        """What the engine can hold."""
        return self._inputs.limits

    @property
    def is_running(self) -> bool:
        return self._cause_of_death is None and self._process.is_alive()

    @property
    def errored(self) -> bool:
        """The engine ended; every call raises EngineDeadError."""
        return not self.is_running

    def shutdown(self, timeout: float = 10.0) -> None:
        """Ends the engine's process, by force after `timeout` seconds. Whoever still waits gets EngineDeadError."""
        self._die("the engine was shut down")
        self._process.close(timeout)
        self._outputs.close()

    # ------------------------------------------------------------------------------------------- to the child process

    def _submit(
        self, request_id: str, prompt: Prompt, sequences: list[CoreRequest], trace_headers: Mapping[str, str] | None
    ) -> Mailbox:
        group = Group.of(request_id, sequences)
        self._outputs.add(request_id, prompt if isinstance(prompt, str) else None, sequences, trace_headers)
        self._outbox.groups.append(group)
        self._flush_soon()
        mailbox = self._mailboxes[request_id] = Mailbox(sequences[0].params.output_kind)
        return mailbox

    def _abort(self, request_id: str) -> None:
        """Ends the request here at once; what the child still sends of it is dropped."""
        seq_ids = self._outputs.seq_ids(request_id)
        self._outbox.aborts += seq_ids
        self._flush_soon()
        self._take_tokens([CoreOutput(seq_id=i, new_token_ids=[], finish_reason="abort") for i in seq_ids])

    async def _ask(self, method: str, *arguments: Any) -> Any:
        self._check_alive()
        self._attach(asyncio.get_running_loop())
        number = next(self._numbers)
        self._outbox.questions.append(Question.of(number, method, *arguments))
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._flush_soon()
        try:
            return await answer
        finally:
            del self._answers[number]

    def _flush_soon(self) -> None:
        """One message carries all that is said in this turn of the loop."""
        if not self._flush_is_due and self._loop is not None and self._cause_of_death is None:
            self._flush_is_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        message, self._outbox = self._outbox, ToEngine()
        self._flush_is_due = False
        if self._cause_of_death is not None:  # between the call and its turn
            return
        try:
            self._process.send(message)
        except EngineDeadError as error:
            self._die(str(error))
        except Exception as error:  # what was said is lost: whoever waits for it must not wait for ever
            logger.exception("a message could not be sent")
            self._die(f"{type(error).__name__}: {error}")

    def _attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Reads the pipe from `loop`, and no longer from an earlier one."""
        if loop is self._loop:
            return
        if self._loop is not None and not self._loop.is_closed():
            if self._mailboxes or self._answers:
                raise RuntimeError("AsyncLLM belongs to one event loop at a time, and another one waits for it")
            self._loop.remove_reader(self._process.fileno())
        self._loop, self._flush_is_due = loop, False
        loop.add_reader(self._process.fileno(), self._read)
        os.set_blocking(self._process.fileno(), True)  # uvloop changes it, and large messages then fail half-way
        for request_id in list(self._mailboxes):  # of a loop that was closed over them
            self._abort(request_id)

    # ----------------------------------------------------------------------------------------- from the child process

    def _read(self) -> None:
        """Takes all that has come: readers that fell behind then find one merged output, and catch up."""
        try:
            self._take(self._process.receive())
            for _ in range(MAX_MESSAGES_A_TURN - 1):
                if not self._process.has_message():
                    break
                self._take(self._process.receive())
        except EngineDeadError as error:
            self._die(str(error))
        except Exception as error:
            logger.exception("an output could not be processed")
            self._die(f"{type(error).__name__}: {error}")

    def _take(self, message: FromEngine) -> None:
        if message.death is not None:
            raise EngineDeadError(message.death)
        for rejection in message.rejections:
            if rejection.seq_id in self._outputs.seq_ids(rejection.request_id):
                error = rejection.error()
                self._outputs.discard(rejection.request_id, error)
                self._mailboxes.pop(rejection.request_id).fail(error)
        for answer in message.answers:
            if (future := self._answers.get(answer.number)) is not None and not future.done():
                if answer.error is None:
                    future.set_result(answer.value)
                else:
                    future.set_exception(RequestError(answer.error))
        self._take_tokens(message.outputs)

    def _take_tokens(self, tokens: list[CoreOutput]) -> None:
        outputs, stopped = self._outputs.process(tokens, time.monotonic())
        for output in outputs:
            mailbox = self._mailboxes[output.request_id]
            if output.finished:
                del self._mailboxes[output.request_id]
            mailbox.put(output)
        if stopped:
            self._outbox.stops += stopped
            self._flush_soon()

    def _check_alive(self) -> None:
        if self._cause_of_death is None and not self._process.is_alive():
            self._die(self._process.epitaph())
        if self._cause_of_death is not None:
            raise EngineDeadError(self._cause_of_death)

    def _die(self, cause: str) -> None:
        if self._cause_of_death is not None:
            return
        self._cause_of_death = cause
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._process.fileno())
            for request_id, mailbox in self._mailboxes.items():
                mailbox.fail(error := EngineDeadError(cause))
                self._outputs.discard(request_id, error)
            for future in self._answers.values():
                if not future.done():
                    future.set_exception(EngineDeadError(cause))
        self._mailboxes.clear()
