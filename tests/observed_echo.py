"""The token core without a model, with the counters and step records of a real one."""

import time

from echo_core import EchoCore, echo

from jaxserve.core_types import CoreOutput
from jaxserve.metrics import EngineMetrics, StepRecord, StepRecorder
from jaxserve.scheduler import DecodeRow, PrefillRow, SchedulerStats, StepPlan

NUM_LAYERS = 8


class ObservedEcho(EchoCore):
    """A request's first step is its prefill: prompts of even length pass the lower half of the layers in it, others the
    upper half."""

    def __init__(self, config: dict):
        super().__init__(config)
        self._metrics, self._recorder = EngineMetrics(), StepRecorder(NUM_LAYERS)

    def step(self) -> list[CoreOutput]:
        now = time.monotonic()
        new = [request for request in self._running.values() if not self._positions[request.seq_id]]
        prefill = [PrefillRow(None, 0, 0, 0, request.prompt_token_ids, True) for request in new]  # pyright: ignore
        decode = [DecodeRow(None, 0, 0)] * (len(self._running) - len(new))  # pyright: ignore
        half = NUM_LAYERS // 2
        lo = half * (len(new[0].prompt_token_ids) % 2) if new else 0
        self._recorder.start(now)
        outputs = super().step()
        number = self._metrics.num_steps + 1
        plan = StepPlan(
            step=number, decode=decode, prefill=prefill, new_slots=[], page_updates=[], span=(lo, lo + half)
        )
        for output in outputs:
            output.first_scheduled_time = now
            if output.finish_reason is not None:
                counts = self._metrics.request_success
                counts[output.finish_reason] = counts.get(output.finish_reason, 0) + 1
        self._metrics.count_step(len(decode) + plan.num_prefill_tokens, 100)
        self._metrics.prompt_tokens += plan.num_prefill_tokens
        self._metrics.generation_tokens += len(outputs)
        how = {"num_new_tokens": len(outputs), "expert_bytes": 100}
        self._recorder.end(plan, self._stats(), now=time.monotonic(), **how)
        return outputs

    def _stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_requests_running=len(self._running),
            num_requests_waiting=3,
            kv_cache_usage_perc=0.25,
            num_preemptions=7,
            prefix_cache_queries=100,
            prefix_cache_hits=40,
        )

    def get_metrics(self) -> dict[str, float]:
        stats = self._stats()
        return self._metrics.as_dict(**{name: getattr(stats, name) for name in stats.__slots__})

    def recent_steps(self, since: int = 0) -> list[StepRecord]:
        return self._recorder.recent(since)


def observed_echo(config: dict):
    """The `CoreFactory`."""
    return ObservedEcho(config), echo(config)[1]
