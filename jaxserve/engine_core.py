"""The step loop: `EngineCore` turns requests of token ids into token updates."""

import collections
import dataclasses
import logging
import os
import pathlib
import time
from collections.abc import Iterable

import jax

from jaxserve import weights
from jaxserve.config import EngineConfig, RunnerConfig, resolve
from jaxserve.core_types import CoreOutput, CoreRequest, TokenLogprobs
from jaxserve.device import Device
from jaxserve.exceptions import EngineDeadError, QueueFullError, RequestError
from jaxserve.grammars import Grammars
from jaxserve.input_processor import RequestLimits, eos_token_ids
from jaxserve.metrics import EngineMetrics, StepRecord, StepRecorder
from jaxserve.multi_process import Leader
from jaxserve.program_set import cohorts_ahead
from jaxserve.runner import Runner
from jaxserve.scheduler import (
    LayeredPrefill,
    PagePool,
    PoolTooSmall,
    QueueFull,
    Request,
    RequestUpdate,
    Scheduler,
    StepPlan,
    prefill_policy,
)
from jaxserve.scheduler.step_time import StepWork
from jaxserve.sharding.mesh import bytes_per_device
from jaxserve.step_future import StepFuture

logger = logging.getLogger(__name__)


class EngineCore:
    """Scheduler and runner around one model. Knows token ids only; not thread-safe."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        async_scheduling: bool = True,
        max_logprobs: int = 20,
        grammars: Grammars | None = None,
    ):
        self.scheduler, self.runner = scheduler, runner
        self._grammars = Grammars(None, 0, []) if grammars is None else grammars
        self.start_s: dict[str, float] = {}  # parts of start-up
        self._max_logprobs = max_logprobs
        self._depth = 1 if async_scheduling else 0  # steps in flight while the host plans the next
        self._in_flight: collections.deque[StepFuture] = collections.deque()
        self._requests: dict[int, Request] = {}
        self._prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}
        self._metrics = EngineMetrics()
        self._recorder = StepRecorder(runner.num_layers)
        self._expert_bytes = runner.expert_bytes
        self._cause_of_death: str | None = None

    @classmethod
    def over(cls, config: EngineConfig, loaded: weights.LoadedModel, leader: Leader | None = None) -> "EngineCore":
        """A core over a loaded model, with sizes that fit this machine.

        Raises:
            ValueError: the options do not fit the model or the machine.
        """
        vocab_size = loaded.model.config.vocab_size
        params_bytes = sum(bytes_per_device(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(loaded.params))
        scheduler_config, runner_config = resolve(config, loaded.model.config, params_bytes=params_bytes)
        blocks = config.runtime.warm_up == "blocking"
        if leader is not None:
            leader.agree(config, loaded.model, runner_config)
        runner = Runner(make_device(config, loaded, runner_config, leader), runner_config)
        if leader is not None:
            leader.wait()
        prefill = prefill_policy(scheduler_config, runner.num_layers, runner.span_rows)
        if config.cache.enable_prefix_caching and not config.shares_pages:
            logger.info("no prefix cache: %s drops tokens, so pages are not shared", config.runtime.sparse)
        pool = PagePool(runner_config.num_pages, runner_config.page_size, runner_config.kv_parallel_size)
        scheduler = Scheduler(
            scheduler_config,
            pool,
            enable_prefix_caching=config.shares_pages,
            prefill=prefill,
        )
        if config.runtime.warm_up != "off":
            try:
                runner.warm_up(block=blocks)
                if isinstance(prefill, LayeredPrefill):
                    _warm_up_layered(prefill, runner, block=blocks)
            except BaseException:  # Ctrl-C, say: what is left of the warm-up must not go on
                runner.close()
                raise
        return cls(
            scheduler,
            runner,
            async_scheduling=config.runtime.async_scheduling,
            max_logprobs=config.model.max_logprobs,
            grammars=Grammars(
                loaded.tokenizer, vocab_size, eos_token_ids(loaded.generation_config, loaded.tokenizer, vocab_size)
            ),
        )

    def limits(self) -> RequestLimits:
        return RequestLimits(
            vocab_size=self.runner.vocab_size,
            max_model_len=self.scheduler.config.max_model_len,
            max_logprobs=self._max_logprobs,
        )

    def add_request(self, core: CoreRequest) -> None:
        """Queues one sequence.

        Raises:
            EngineDeadError: an earlier step failed.
            QueueFullError: the queue is at its limit.
            RequestError: the prompt can never fit the KV pool, or a grammar is asked for and there is no tokenizer.
        """
        self._check_alive()
        self._grammars.check(core)
        request = Request(
            request_id=core.seq_id,
            prompt_token_ids=core.prompt_token_ids,
            max_tokens=core.params.max_tokens or 1,
            min_tokens=core.params.min_tokens,
            stop_token_ids=frozenset(core.params.stop_token_ids or ()),
            eos_token_ids=frozenset(core.eos_token_ids),
            arrival_time=core.arrival_time,
            priority=core.priority,
            deadline=core.deadline,
            cache_salt=core.cache_salt,
            skip_reading_prefix_cache=core.params.prompt_logprobs is not None,
            leader=None if core.leader is None else self._requests.get(core.leader),
            held=core.params.structured_outputs is not None,
            sampling=core,
        )
        try:
            self.scheduler.add(request)
        except QueueFull as error:
            raise QueueFullError(str(error)) from error
        except PoolTooSmall as error:
            raise RequestError(str(error)) from error
        self._requests[core.seq_id] = request
        self._grammars.add(core)
        if core.params.prompt_logprobs is not None:
            self._prompt_logprobs[core.seq_id] = [None] * len(core.prompt_token_ids)
        self._metrics.prompt_tokens += len(core.prompt_token_ids)

    def finish(self, seq_ids: Iterable[int], reason: str, stop_reason: str | None = None) -> list[CoreOutput]:
        """Ends sequences from outside (abort, stop string), in any state; unknown ids are no-ops."""
        ended = []
        for seq_id in seq_ids:
            request = self._requests.get(seq_id)
            if request is not None:
                self.scheduler.finish(request, reason, stop_reason)
                ended.append(self._output(RequestUpdate(request, [], reason, stop_reason)))
        return ended

    def step(self) -> list[CoreOutput]:
        """One step of the engine: plan the next, start it, then read the one before.

        Raises:
            EngineDeadError: the device or the engine failed, now or earlier; device state may be lost.
        """
        self._check_alive()
        try:
            if self.runner.device.leader is not None:
                self.runner.device.leader.check()
            outputs = self._read(down_to=self._depth)  # what an interrupted step left
            outputs += self._release_held()
            now = time.monotonic()
            plan = self.scheduler.schedule(now)
            if plan is not None:
                self._recorder.start(now)
                self._dispatch(plan)
            elif not self._in_flight and self._grammars:
                self._grammars.wait()
            outputs += self._read(down_to=0 if plan is None else self._depth)
            return outputs + [self._output(update) for update in self.scheduler.expired()]
        except EngineDeadError as error:
            self._cause_of_death = str(error)
            raise
        except Exception as error:
            self._cause_of_death = f"a step failed: {type(error).__name__}: {error}"
            raise EngineDeadError(self._cause_of_death) from error

    def settle(self) -> list[CoreOutput]:
        """Reads the steps in flight without starting another."""
        self._check_alive()
        return self._read(down_to=0)

    def _dispatch(self, plan: StepPlan) -> None:
        """Starts a step. If it has rows under a grammar, `_read` samples it: their masks need the tokens before."""
        with jax.profiler.StepTraceAnnotation("step", step_num=plan.step):  # what profilers group by
            future = self.runner.dispatch(plan)
            self._in_flight.append(future)
            if not self._under_grammar(plan):
                self.runner.sample(future)

    def _under_grammar(self, plan: StepPlan) -> list[Request]:
        """The requests that sample under a grammar in this step and have not ended since."""
        if not self._grammars:
            return []
        rows = [*plan.decode, *(row for row in plan.prefill if row.samples)]
        live = (row.request for row in rows if row.epoch == row.request.epoch)
        return [request for request in live if request.request_id in self._grammars]

    def _read(self, *, down_to: int) -> list[CoreOutput]:
        """Commits the oldest steps in flight until so many are left. An interrupted wait leaves its step to be read."""
        outputs = []
        while self._in_flight:
            future = self._in_flight[0]
            if future.hidden is not None:  # every token before this step is committed
                requests = self._under_grammar(future.plan)
                masks = self._grammars.masks([request.request_id for request in requests])
                self.runner.sample(future, [request.slot for request in requests], masks)
            if len(self._in_flight) <= down_to:
                break
            result = self.runner.result(future)
            expert_bytes = self._expert_bytes * future.num_experts_read()
            self._collect_prompt_logprobs(future)
            del self._in_flight[0]
            now = time.monotonic()
            updates = self.scheduler.commit(future.plan, result, now)
            self._record(future.plan, sum(len(update.new_token_ids) for update in updates), expert_bytes, now)
            outputs += [self._output(update) for update in updates]
            if self._grammars:
                outputs += self._advance_grammars(updates)
        return outputs

    def _record(self, plan: StepPlan, num_new_tokens: int, expert_bytes: int, now: float) -> None:
        self._metrics.count_step(len(plan.decode) + plan.num_prefill_tokens, expert_bytes)
        how = {"num_new_tokens": num_new_tokens, "expert_bytes": expert_bytes}
        record = self._recorder.end(plan, self.scheduler.stats(), now=now, **how)
        self.scheduler.observe(plan, record.duration_s)

    def _release_held(self) -> list[CoreOutput]:
        """Lets requests go whose grammars are ready; ends those whose grammars cannot be used."""
        ended = []
        for seq_id, error in self._grammars.ready():
            if error is None:
                self.scheduler.release(self._requests[seq_id])
            else:
                ended += self.finish([seq_id], "error", error)
        return ended

    def _advance_grammars(self, updates: list[RequestUpdate]) -> list[CoreOutput]:
        """Moves on over committed tokens; ends sequences whose grammar is complete or has no way on."""
        ended = []
        for update in updates:
            seq_id = update.request.request_id
            if update.finish_reason is None and seq_id in self._grammars:
                reason = self._grammars.advance(seq_id, update.new_token_ids)
                if reason is not None:
                    ended += self.finish([seq_id], reason)
        return ended

    def _check_alive(self) -> None:
        if self._cause_of_death is not None:
            raise EngineDeadError(self._cause_of_death)

    def has_unfinished(self) -> bool:
        """Whether `step` has anything left to do: reading the last step's result too, and telling of a death."""
        return bool(self._in_flight) or self.scheduler.has_unfinished() or self._lost()

    def _lost(self) -> bool:
        leader = self.runner.device.leader
        return leader is not None and leader.has_lost and self._cause_of_death is None

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached pages; False (and nothing done) while requests hold pages."""
        return self.scheduler.reset_prefix_cache()

    def get_metrics(self) -> dict[str, float]:
        return self._metrics.as_dict(
            **dataclasses.asdict(self.scheduler.stats()),
            num_stalls=self.runner.num_stalls,
            compile_seconds=self.runner.compile_s,
            **{f"start_{part}_seconds": seconds for part, seconds in self.start_s.items()},
        )

    def recent_steps(self, since: int = 0) -> list[StepRecord]:
        """Records of the last steps (at most 512), oldest first; only of those after step number `since`."""
        return self._recorder.recent(since)

    def start_profile(self, directory: str) -> None:
        """Starts to trace this process with JAX's profiler; `stop_profile` writes the trace into `directory`.

        Raises:
            RequestError: the directory cannot be made, or a profile runs already; the engine goes on.
        """
        try:
            pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # a record of every Python call slows each step and fills the trace
            jax.profiler.start_trace(directory, profiler_options=options)
        except (OSError, RuntimeError) as error:
            raise RequestError(f"cannot profile into {directory}: {error}") from error

    def stop_profile(self) -> None:
        """Ends the profile and writes it; no step runs meanwhile, which may take seconds.

        Raises:
            RequestError: no profile runs, or it cannot be written.
        """
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as error:
            raise RequestError(f"cannot end the profile: {error}") from error

    def close(self) -> None:
        """Stops background compiles and frees the device's memory. The core cannot step any more."""
        self._cause_of_death = self._cause_of_death or "it was closed"
        self.runner.close()
        self._grammars.close()

    def _collect_prompt_logprobs(self, future: StepFuture) -> None:
        for request, position, found in future.prompt_logprobs():
            slots = self._prompt_logprobs.get(request.request_id)
            if slots is not None:
                slots[position : position + len(found)] = found

    def _output(self, update: RequestUpdate) -> CoreOutput:
        request, stop_reason = update.request, update.stop_reason
        self._metrics.generation_tokens += len(update.new_token_ids)
        if update.finish_reason is not None:
            if update.finish_reason == "error" and stop_reason is None:
                stop_reason = self._grammars.problem(request.request_id)
            self._grammars.drop(request.request_id)
            counts = self._metrics.request_success
            counts[update.finish_reason] = counts.get(update.finish_reason, 0) + 1
            self._requests.pop(request.request_id, None)
        return CoreOutput(
            seq_id=request.request_id,
            new_token_ids=update.new_token_ids,
            finish_reason=update.finish_reason,
            stop_reason=stop_reason,
            logprobs=update.logprobs,
            prompt_logprobs=self._prompt_logprobs.pop(request.request_id, None) if self._prompt_logprobs else None,
            num_cached_tokens=request.num_cached_tokens,
            first_scheduled_time=request.first_scheduled_time,
            num_preemptions=request.num_preemptions,
        )


def _warm_up_layered(prefill: LayeredPrefill, runner: Runner, *, block: bool) -> None:
    """Teaches the policy what steps take, where there is time for that, and compiles what it will ask for."""
    if block:
        times = runner.time_steps()
        for _ in range(20):  # the model takes a small step towards each
            for shape, seconds in times:
                tokens = shape.prefill_tokens
                pairs = tokens**2 / 2 / max(shape.prefill_seqs, 1)
                prefill.step_time.observe(StepWork(shape.decode_rows, 0, tokens, pairs, float(tokens > 0)), seconds)
    runner.compile_spans(cohorts_ahead(prefill, runner.config), block=block)


def make_device(
    config: EngineConfig, loaded: weights.LoadedModel, sizes: RunnerConfig, leader: Leader | None
) -> Device:
    threads = min(8, num_cpus()) if config.runtime.warm_up == "blocking" else 1  # one has to do beside running steps
    return Device(
        loaded.model, loaded.params, sizes, kv_dtype=config.kv_dtype, num_compile_threads=threads, leader=leader
    )


def num_cpus() -> int:
    """Of those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
