"""The engine as the endpoints see it: requests in, outputs out, and whether it takes any."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

from jaxserve.async_engine import AsyncLLM
from jaxserve.exceptions import EngineDeadError
from jaxserve.input_processor import Prompt
from jaxserve.outputs import RequestOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.errors import unavailable
from jaxserve.server.options import ServerOptions
from jaxserve.server.progress import Progress, ProgressWatch

type Observer = Callable[[RequestOutput, Progress], None]
type Outputs = AsyncGenerator[tuple[int, RequestOutput]]  # with the number of the prompt


class Service:
    """`llm` is None until the model is loaded.

    Each observer is called for every output, with what is new in it, before it is written. An output is the observers'
    to read, not to keep: what is in it grows or is dropped later.
    """

    def __init__(self, llm: AsyncLLM | None, options: ServerOptions, observers: Sequence[Observer] = ()):
        self.llm, self.options = llm, options
        self._draining = self._hurried = False
        self._observers, self._watch = tuple(observers), ProgressWatch()
        self._running: set[str] = set()  # engine's request ids

    @property
    def num_running(self) -> int:
        """Requests that have not had their last output, one for each prompt."""
        return len(self._running)

    def loaded(self) -> AsyncLLM:
        """Raises ApiError, 503, while the model is loading."""
        if self.llm is None:
            raise unavailable("the model is still loading; /ready tells when it is done", "loading")
        return self.llm

    def engine(self) -> AsyncLLM:
        """Raises ApiError, 503, while no requests are taken."""
        if self._draining:
            raise unavailable("the server is stopping", "stopping")
        return self.loaded()

    def is_alive(self) -> bool:
        """False when the engine has ended."""
        return self.llm is None or self.llm.is_running

    def is_ready(self) -> bool:
        """The model is loaded and requests are taken."""
        return self.llm is not None and not self._draining and self.llm.is_running

    async def generate(
        self,
        request_id: str,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        priority: int,
        salt: str | None,
        trace_headers: Mapping[str, str],
    ) -> Outputs:
        """The outputs of all prompts as they come, until each is finished. Closing it aborts what still runs.

        Raises:
            ApiError, RequestError, ParameterError, QueueFullError, EngineDeadError: as the engine does; an error of
                one prompt ends them all. ApiError, 503, too, where the end of `drain` cut an answer short.
        """
        llm = self.engine()
        ids = [request_id] if len(prompts) == 1 else [f"{request_id}-{i}" for i in range(len(prompts))]
        streams = [
            llm.generate(prompt, params, one_id, priority=priority, cache_salt=salt, trace_headers=trace_headers)
            for prompt, one_id in zip(prompts, ids, strict=True)
        ]
        self._running.update(ids)
        try:
            async with contextlib.aclosing(_only(streams[0]) if len(streams) == 1 else _merged(streams)) as outputs:
                async for index, output in outputs:
                    progress = self._watch.advance(output)
                    for observe in self._observers:
                        observe(output, progress)
                    if self._draining and any(sample.finish_reason == "abort" for sample in output.outputs):
                        raise unavailable("the server stopped before the answer was complete", "stopping")
                    yield index, output
        finally:
            self._running.difference_update(ids)

    def close(self) -> None:
        """Refuses new requests from now on."""
        self._draining = True

    def hurry(self) -> None:
        """Lets `drain`, now or later, wait for nobody."""
        self._hurried = True

    async def drain(self) -> None:
        """Refuses new requests and waits for the running ones; ends those that run at the limit, or at `hurry`."""
        self.close()
        end = time.monotonic() + self.options.drain_timeout_s
        while self._running and not self._hurried and time.monotonic() < end:
            await asyncio.sleep(0.05)
        with contextlib.suppress(EngineDeadError):
            for request_id in list(self._running):
                await self.loaded().abort(request_id)


async def _only(stream: AsyncGenerator[RequestOutput]) -> Outputs:
    async with contextlib.aclosing(stream):
        async for output in stream:
            yield 0, output


async def _merged(streams: Sequence[AsyncGenerator[RequestOutput]]) -> Outputs:
    """While nobody takes an output, one waits here and the others in their mailboxes, merged."""
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception]] = asyncio.Queue(maxsize=1)

    async def pump(index: int, stream: AsyncGenerator[RequestOutput]) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for output in stream:
                    await queue.put((index, output))
        except Exception as error:
            await queue.put((index, error))

    pumps = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        num_unfinished = len(streams)
        while num_unfinished:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            num_unfinished -= item.finished
            yield index, item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
