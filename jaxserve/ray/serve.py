"""A service on Ray Serve: replicas of an engine behind the OpenAI-compatible HTTP server, with prefix-aware routing.

    front end (HTTP, no model)  --PrefixRouter-->  Engine replica (AsyncLLM, its own accelerators)
                                               \\->  Engine replica ...
"""

import dataclasses
import random
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from jaxserve.async_engine import AsyncLLM
from jaxserve.engine_messages import TokenizerFacts
from jaxserve.exceptions import EngineDeadError
from jaxserve.outputs import RequestOutput
from jaxserve.ray.router import PrefixRouter
from jaxserve.sampling_params import RequestOutputKind, SamplingParams
from jaxserve.tokenizer import Tokenizer

MAX_ATTEMPTS = 3  # of one request, on as many replicas


class Engine:
    """One replica: an `AsyncLLM`, by remote calls. Serve replaces it when `check_health` raises."""

    def __init__(self, model: str, options: Mapping[str, Any]):
        self._llm = AsyncLLM(model, **options)

    async def generate(
        self, prompt: str | list[int], sampling_params: SamplingParams, request_id: str, options: Mapping[str, Any]
    ) -> AsyncGenerator[RequestOutput]:
        async for output in self._llm.generate(prompt, sampling_params, request_id, **options):
            yield output

    async def facts(self) -> tuple[TokenizerFacts | None, SamplingParams]:
        tokenizer = None if self._llm.tokenizer is None else TokenizerFacts.of(self._llm.tokenizer)
        return tokenizer, self._llm.default_sampling_params

    async def get_metrics(self) -> dict[str, float]:
        return await self._llm.get_metrics()

    async def check_health(self) -> None:
        await self._llm.check_health()


class RemoteLLM:
    """What `AsyncLLM` offers to a server, over the replicas behind a handle."""

    def __init__(self, engine: DeploymentHandle, tokenizer: Tokenizer | None, defaults: SamplingParams):
        self._engine = engine
        self.tokenizer, self.default_sampling_params = tokenizer, defaults
        self._seeds = random.Random()

    @classmethod
    async def over(cls, engine: DeploymentHandle) -> "RemoteLLM":
        """Waits for the first replica."""
        facts, defaults = await engine.facts.remote()
        return cls(engine, None if facts is None else facts.tokenizer(), defaults)

    async def generate(
        self, prompt: str | list[int], sampling_params: SamplingParams | None, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput]:
        """As `AsyncLLM.generate`. A request whose replica dies starts again on another one, unless part of its answer
        was already handed over as deltas.

        Raises:
            EngineDeadError: its replica died, and it could not start again.
        """
        params = sampling_params or self.default_sampling_params
        if params.seed is None:  # so that a second attempt draws the same tokens
            params = dataclasses.replace(params, seed=self._seeds.getrandbits(63))
        is_delta = params.output_kind is RequestOutputKind.DELTA
        for attempt in range(1, MAX_ATTEMPTS + 1):
            stream = self._engine.options(stream=True).generate.remote(prompt, params, request_id, options)
            begun = False
            try:
                async for output in stream:
                    begun = True
                    yield output
                return
            except (RayActorError, EngineDeadError) as error:
                if attempt == MAX_ATTEMPTS or (begun and is_delta):
                    raise EngineDeadError(f"the replica that served {request_id!r} died: {error}") from error
            finally:
                stream.cancel()  # a no-op once it ended

    async def get_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer")
        return self.tokenizer

    async def get_metrics(self) -> dict[str, float]:
        """Those of one replica: Ray's own metrics tell of the fleet."""
        return await self._engine.get_metrics.remote()
