"""The engine of one process: the text around an `EngineCore`, and the load of its model."""

import dataclasses
import logging
import os
import pathlib
import time
from collections.abc import Iterable, Mapping

import jax

from jaxserve import multi_process, tracing, weights
from jaxserve.config import EngineConfig
from jaxserve.core_types import CoreOutput
from jaxserve.engine_core import EngineCore, make_device
from jaxserve.exceptions import ParameterError, RequestError
from jaxserve.input_processor import InputProcessor, Prompt
from jaxserve.metrics import StepRecord
from jaxserve.output_processor import OutputProcessor
from jaxserve.outputs import RequestOutput
from jaxserve.pallas_kernels.target import target_device
from jaxserve.sampling_params import SamplingParams
from jaxserve.sharding.mesh import make_mesh
from jaxserve.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class LLMEngine:
    """Requests of text in, outputs of text out, one `step()` at a time. The testable whole; not thread-safe."""

    def __init__(self, config: EngineConfig):
        tracer = tracing.configured(config.runtime.otlp_traces_endpoint, model=config.model.model)
        loaded, self.core = start_core(config)
        self.tokenizer: Tokenizer | None = loaded.tokenizer
        self._inputs = InputProcessor(
            self.tokenizer, self.core.limits(), loaded.generation_config, seed=config.model.seed
        )
        self._outputs = OutputProcessor(self.tokenizer, tracer)

    @property
    def default_sampling_params(self) -> SamplingParams:
        return self._inputs.default_sampling_params

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline: float | None = None,
        cache_salt: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> None:
        """Queues one request; `params=None` takes the model's defaults.

        Args:
            priority: lower goes first, under scheduling_policy="priority".
            deadline: seconds from now; a request that is not done by then ends with finish_reason "abort".
            cache_salt: requests share cached pages only with the same salt.
            trace_headers: may hold a W3C `traceparent`, below which the request's span goes.

        Raises:
            RequestError: the request cannot be served (duplicate id, empty or too long prompt, queue full, ...).
            ParameterError: a sampling parameter that this model cannot serve.
        """
        if not isinstance(request_id, str):
            raise ParameterError("request_id", request_id, "a str")
        if request_id in self._outputs:
            raise RequestError(f"request id {request_id!r} is in use; give each running request an id of its own")
        cores = self._inputs.process(
            prompt, params, now=time.monotonic(), priority=priority, deadline=deadline, cache_salt=cache_salt
        )
        self._outputs.add(request_id, prompt if isinstance(prompt, str) else None, cores, trace_headers)
        try:
            for core in cores:
                self.core.add_request(core)
        except BaseException as error:
            self.core.finish([core.seq_id for core in cores], "abort")
            self._outputs.discard(request_id, error)
            raise

    def step(self) -> list[RequestOutput]:
        """Runs one step and returns what changed for callers."""
        return self._take(self.core.step())

    def settle(self) -> list[RequestOutput]:
        """Reads the steps in flight without starting another: afterwards ended requests hold no pages."""
        return self._take(self.core.settle())

    def _take(self, core_outputs: list[CoreOutput]) -> list[RequestOutput]:
        outputs, stopped = self._outputs.process(core_outputs, time.monotonic())
        for seq_id, stop in stopped:
            self.core.finish([seq_id], "stop", stop)
        return outputs

    def abort_request(self, request_ids: str | Iterable[str]) -> list[RequestOutput]:
        """Ends requests in whatever state they are and returns their last outputs; unknown ids are no-ops."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        ended = self.core.finish([seq for i in ids for seq in self._outputs.seq_ids(i)], "abort")
        return self._outputs.process(ended, time.monotonic())[0]

    def has_unfinished_requests(self) -> bool:
        return self.core.has_unfinished()

    def get_num_unfinished_requests(self) -> int:
        return len(self._outputs)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached pages; False (and nothing done) while requests hold pages."""
        return self.core.reset_prefix_cache()

    def get_metrics(self) -> dict[str, float]:
        """All counters and gauges by name."""
        return self.core.get_metrics()

    def recent_steps(self, since: int = 0) -> list[StepRecord]:
        """Records of the last steps (at most 512), oldest first; only of those after step number `since`."""
        return self.core.recent_steps(since)

    def start_profile(self, directory: str | os.PathLike[str]) -> None:
        """Starts a JAX profiler trace of this process, which `stop_profile` writes into `directory`.

        Raises:
            RequestError: the directory cannot be made, or a profile runs already; the engine goes on.
        """
        self.core.start_profile(os.fspath(directory))

    def stop_profile(self) -> None:
        """Ends the profile and writes it, which may take seconds. Raises RequestError when none runs."""
        self.core.stop_profile()

    def close(self) -> None:
        self.core.close()
        self._outputs.close()


def start_core(config: EngineConfig) -> tuple[weights.LoadedModel, EngineCore]:
    """The model that the options name, and a core over it that knows how long its start took.

    Of several processes this is for process 0 alone; in another one it serves that one, and never returns.

    Raises:
        SystemExit: this is another process, and process 0 has ended well.
    """
    start = time.monotonic()
    group = multi_process.join(config.parallel)
    try:
        loaded = load_model(config)
        if isinstance(group, multi_process.Follower):
            _follow(group, config, loaded)
            raise SystemExit(0)
        middle = time.monotonic()
        core = EngineCore.over(config, loaded, group)
    except BaseException as error:
        if group is not None:
            group.close("" if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}")
        raise
    core.start_s = {"load": middle - start, "engine": time.monotonic() - middle}
    return loaded, core


def _follow(group: multi_process.Follower, config: EngineConfig, loaded: weights.LoadedModel) -> None:
    device = make_device(config, loaded, group.agree(config, loaded.model), None)
    group.follow(device)
    device.close()


def load_model(config: EngineConfig) -> weights.LoadedModel:
    """Weights and tokenizer that the options name."""
    use_compilation_cache(config.runtime.compilation_cache_dir)
    options = config.model
    loaded = weights.load(
        options.model,
        dtype=options.jax_dtype,
        load_format=options.load_format,
        quantization=options.quantization,
        revision=options.revision,
        tokenizer=options.tokenizer,
        seed=options.seed,
        stacked=target_device().platform != "cpu",
        mesh=make_mesh(config.parallel.kv_parallel_size, config.parallel.tensor_parallel_size),
    )
    model = dataclasses.replace(loaded.model, sparse=config.runtime.sparse)
    return dataclasses.replace(loaded, model=model)


def use_compilation_cache(directory: str | None) -> None:
    """Keeps compiled programs on disk, small ones too, unless the process already chose a cache of its own."""
    if directory is None or jax.config.jax_compilation_cache_dir:
        return
    path = pathlib.Path(directory).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("no compilation cache: %s cannot be made: %s", path, error)
        return
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
