"""A service on Ray Serve: the HTTP server in front, replicas of the engine behind, like prompts to the same replica.

front end (HTTP, no model)  --PrefixRouter-->  Engine (an AsyncLLM with accelerators of its own)
                                           \\-> Engine ...
"""

import dataclasses
import os
import random
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from jaxserve.async_engine import AsyncLLM
from jaxserve.engine_messages import TokenizerFacts
from jaxserve.exceptions import EngineDeadError
from jaxserve.input_processor import Prompt, RequestLimits
from jaxserve.outputs import RequestOutput
from jaxserve.ray.router import PrefixRouter
from jaxserve.sampling_params import RequestOutputKind, SamplingParams
from jaxserve.server import app as http
from jaxserve.server.options import ServerOptions
from jaxserve.tokenizer import Tokenizer

MAX_ATTEMPTS = 3  # of one request
MAX_ONGOING = 1024  # requests of a replica; the engine has a queue of its own


def build_app(
    model: str,
    *,
    replicas: int = 1,
    front_ends: int = 1,
    resources: Mapping[str, Any] | None = None,
    api_keys: tuple[str, ...] = (),
    served_model_name: str | None = None,
    **options: Any,
) -> Application:
    """An application for `ray.serve.run`: OpenAI's API, as of `jaxserve serve`, over `replicas` engines.

    Args:
        front_ends: processes that speak HTTP and route; each learns by itself where prompts went.
        resources: what Ray is to reserve for a replica: `{"num_gpus": 1}`, `{"resources": {"TPU": 4}}`.
        options: those of `LLM`.
    """
    engine = serve.deployment(
        Engine,
        name="engine",
        num_replicas=replicas,
        max_ongoing_requests=MAX_ONGOING,
        ray_actor_options=dict(resources or {}),
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
    ).bind(model, options)
    server_options = ServerOptions(served_model_name=served_model_name or model, api_keys=tuple(api_keys))
    front_end = serve.deployment(
        serve.ingress()(FrontEnd),
        name="front_end",
        num_replicas=front_ends,
        max_ongoing_requests=MAX_ONGOING,
        ray_actor_options={"num_cpus": 0},  # a router; the CPUs are for replicas
    )
    return front_end.bind(engine, server_options)


class Engine:
    """One replica: an `AsyncLLM` by remote calls. Serve replaces it when `check_health` raises."""

    def __init__(self, model: str, options: Mapping[str, Any]):
        self._llm = AsyncLLM(model, **options)

    async def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str, options: Mapping[str, Any]
    ) -> AsyncGenerator[RequestOutput]:
        try:
            async for output in self._llm.generate(prompt, params, request_id, **options):
                yield output
        except EngineDeadError:
            os._exit(1)  # at once, or the router would send the next attempt to the replica that is idle: this one

    async def facts(self) -> tuple[TokenizerFacts | None, RequestLimits, SamplingParams]:
        """What a front end must know of the model."""
        try:
            tokenizer = TokenizerFacts.of(await self._llm.get_tokenizer())
        except ValueError:
            tokenizer = None
        return tokenizer, self._llm.limits, self._llm.get_default_sampling_params()

    async def check_health(self) -> None:
        await self._llm.check_health()


class RemoteLLM:
    """What a server uses of `AsyncLLM`, over the replicas behind a handle."""

    is_running = True  # a replica that dies is replaced

    def __init__(
        self, engine: DeploymentHandle, tokenizer: Tokenizer | None, limits: RequestLimits, defaults: SamplingParams
    ):
        self._engine, self._tokenizer, self.limits, self._defaults = engine, tokenizer, limits, defaults
        self._seeds = random.Random()

    @classmethod
    async def over(cls, engine: DeploymentHandle) -> "RemoteLLM":
        """Waits for a replica."""
        tokenizer, limits, defaults = await engine.facts.remote()
        return cls(engine, tokenizer and tokenizer.tokenizer(), limits, defaults)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """As `AsyncLLM.generate`, without a deadline.

        A request whose replica dies starts again on another, unless some of its deltas were handed over already.

        Raises:
            RequestError, ParameterError, TypeError: as `AsyncLLM.generate`.
            EngineDeadError: its replica died, and it could not start again.
        """
        params = sampling_params or self._defaults
        if params.seed is None:  # so that another attempt draws the same tokens
            params = dataclasses.replace(params, seed=self._seeds.getrandbits(63))
        options = {"priority": priority, "cache_salt": cache_salt, "trace_headers": trace_headers}
        begun = False
        for attempt in range(1, MAX_ATTEMPTS + 1):
            stream = self._engine.options(stream=True).generate.remote(prompt, params, request_id, options)
            try:
                async for output in stream:
                    yield output
                    begun = params.output_kind is RequestOutputKind.DELTA
                return
            except RayTaskError as error:  # what the replica raised, in Ray's words: its traceback
                raise error.cause from None
            except RayActorError as error:
                if attempt == MAX_ATTEMPTS or begun:
                    raise EngineDeadError(f"the replica that served {request_id!r} died: {error}") from error
            finally:
                stream.cancel()  # nothing, once it has ended

    async def get_tokenizer(self) -> Tokenizer:
        """Raises ValueError for a model without one."""
        if self._tokenizer is None:
            raise ValueError("this model has no tokenizer")
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        return self._defaults


class FrontEnd:
    """The HTTP server without an engine of its own."""

    async def __init__(self, engine: DeploymentHandle, options: ServerOptions):
        self._llm, self._options = await RemoteLLM.over(engine), options

    def __serve_build_asgi_app__(self) -> Starlette:
        return http.build_app(self._llm, self._options)
