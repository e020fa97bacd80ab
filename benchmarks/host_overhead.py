"""Host time of one engine step with a null model: what the device never has to wait for.

256 running sequences decode under EngineCore and OutputProcessor; only the device's programs are replaced, by functions
that return at once. Reported for short and long contexts, since host time must not grow with them:

    schedule + build   Scheduler.schedule, and Runner.dispatch and sample, which pack the plan
    commit + outputs   the rest of the step: reading the tokens, the commit, detokenising, a DELTA output a sequence

The layered case has prompts of 8,192 tokens besides, which pass 48 layers in 16 groups, with more of them waiting. In
the cases "told" 1 or 15 other processes are told of each step over loopback (`jaxserve.multi_process`).

    python -m benchmarks.host_overhead
"""

import concurrent.futures
import socket
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks._report import Row, report
from jaxserve.config import RunnerConfig
from jaxserve.core_types import CoreRequest
from jaxserve.device import Device
from jaxserve.engine_core import EngineCore
from jaxserve.layers.sampler import Sampled
from jaxserve.multi_process import Follower, Leader
from jaxserve.output_processor import OutputProcessor
from jaxserve.runner import Runner
from jaxserve.sampling_params import RequestOutputKind, SamplingParams
from jaxserve.scheduler import PagePool, Scheduler, SchedulerConfig, StepPlan, prefill_policy
from jaxserve.weights.loader import open_tokenizer

NUM_SEQS, PAGE_SIZE, NUM_STEPS = 256, 64, 400
SCHEDULE_TARGET_MS, COMMIT_TARGET_MS = 0.3, 1.0


class HostArray(np.ndarray):
    def copy_to_host_async(self) -> None:
        pass

    def is_ready(self) -> bool:
        return True


class NullPrograms:
    """Compiled programs that cover every key and do nothing."""

    def __init__(self, function):
        self._function = function

    def get(self, key):
        return key, self._function

    def exact(self, key):
        return self._function


class NullDevice(Device):
    """Samples token 65 + slot % 26."""

    model: Any = types.SimpleNamespace(config=types.SimpleNamespace(num_layers=48, vocab_size=49152))
    expert_bytes = 0

    def __init__(self, leader: Leader | None):
        self.leader, self._passed = leader, {}
        self.params, self._head, self.kv, self._sequences, self._sampling = {}, {}, {}, None, None
        self.forward = NullPrograms(lambda params, kv, sequences, *_: (np.zeros(0), np.zeros(0), None, kv, sequences))
        self.sample = NullPrograms(self._null_sample)
        self.update_tables = NullPrograms(lambda sequences, rows: sequences)
        self.start_slots = NullPrograms(lambda sequences, sampling, ints, floats: (sequences, sampling))

    @staticmethod
    def _null_sample(head, hidden, rows, sequences, sampling):
        tokens = (65 + rows % 26).view(HostArray)
        return Sampled(tokens, None, None, None, None), sequences, sampling


class Stopwatch:
    """Adds up the time inside the functions that it wraps."""

    def __init__(self):
        self.total_s = 0.0

    def timed(self, function):
        def wrapped(*arguments):
            start = time.perf_counter()
            result = function(*arguments)
            self.total_s += time.perf_counter() - start
            return result

        return wrapped


def measure(context_len: int, leader: Leader | None = None) -> tuple[float, float]:
    """Median milliseconds of (schedule + build, commit + outputs) at `context_len` tokens a sequence."""
    max_model_len = context_len + NUM_STEPS + 8
    scheduler_config = SchedulerConfig(
        max_num_seqs=NUM_SEQS, max_num_batched_tokens=64 * context_len, max_model_len=max_model_len
    )
    sequences = [core_request(i, [i] * context_len, NUM_STEPS + 4) for i in range(NUM_SEQS)]
    return timed(scheduler_config, sequences, lambda plan: len(plan.decode) == NUM_SEQS, leader)


def measure_told(num_processes: int) -> tuple[float, float]:
    """As `measure`, where that many other processes, here over loopback, are told of each step."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"from benchmarks.host_overhead import follow; follow({port}, {num_processes})"
        others = subprocess.Popen([sys.executable, "-c", code])
        leader = Leader({i + 1: server.accept()[0] for i in range(num_processes)})
    found = measure(128, leader)
    leader.close()
    others.wait()
    return found


def follow(port: int, num_processes: int) -> None:
    """As so many processes whose device does nothing, until process 0 ends."""
    target = types.SimpleNamespace(**dict.fromkeys(dir(Device), lambda *_: None))
    followers = [Follower(socket.create_connection(("127.0.0.1", port))) for _ in range(num_processes)]
    with concurrent.futures.ThreadPoolExecutor(num_processes) as pool:
        list(pool.map(lambda follower: (follower.follow(target), follower.close()), followers))


def measure_layered(num_prompts: int = 24, prompt_len: int = 8192) -> tuple[float, float]:
    """As `measure`, of the steps in which a prompt passes one of 16 groups of layers beside all others' decodes."""
    scheduler_config = SchedulerConfig(
        max_num_seqs=NUM_SEQS,
        max_num_batched_tokens=prompt_len + NUM_SEQS,
        max_model_len=prompt_len + NUM_STEPS + 8,
        prefill="layered",
        prefill_order="shortest",
    )
    sequences = [core_request(i, [i], NUM_STEPS + 4) for i in range(NUM_SEQS - 1)]
    prompts = [core_request(NUM_SEQS + i, [1000 + i] * prompt_len, 1) for i in range(num_prompts)]
    return timed(scheduler_config, sequences + prompts, lambda plan: plan.span is not None)


def core_request(seq_id: int, prompt: list[int], num_tokens: int) -> CoreRequest:
    params = SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    return CoreRequest(seq_id=seq_id, prompt_token_ids=prompt, params=params, eos_token_ids=[])


def timed(
    config: SchedulerConfig,
    requests: list[CoreRequest],
    counts: Callable[[StepPlan], bool],
    leader: Leader | None = None,
):
    """Median milliseconds of (schedule + build, commit + outputs) of the steps that count, and have all sequences."""
    lens = [len(request.prompt_token_ids) + (request.params.max_tokens or 0) for request in requests]
    pages = sum(-(-length // PAGE_SIZE) for length in lens) + 1
    runner_config = RunnerConfig(
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        page_size=PAGE_SIZE,
        num_pages=pages,
        max_logprobs=20,
        min_decode_rows=2,
        mixed_decode_rows=tuple(sorted({min(rows, config.max_num_seqs) for rows in (16, 64, 256)})),
        prefill_tokens=(config.max_num_batched_tokens,),
    )
    runner = Runner(NullDevice(leader), runner_config)
    runner._max_spans = 4096  # a CPU's programs are few
    prefill = prefill_policy(config, runner.num_layers, runner.span_rows)
    scheduler = Scheduler(config, PagePool(num_pages=pages, page_size=PAGE_SIZE), prefill=prefill)
    core, outputs = EngineCore(scheduler, runner), OutputProcessor(open_tokenizer("smollm2-135m", revision=None))
    build, plans = Stopwatch(), []
    scheduler.schedule = build.timed(scheduler.schedule)
    dispatch = build.timed(runner.dispatch)
    runner.dispatch = lambda plan: plans.append(plan) or dispatch(plan)
    runner.sample = build.timed(runner.sample)
    for request in requests:
        outputs.add(str(request.seq_id), None, [request])
        core.add_request(request)
    build_s, commit_s = [], []
    while core.has_unfinished():
        start, build.total_s = time.perf_counter(), 0.0
        outputs.process(core.step(), start)
        if plans and len(plans[-1].decode) >= len(requests) // 2 and counts(plans[-1]):
            build_s.append(build.total_s)
            commit_s.append(time.perf_counter() - start - build.total_s)
    assert len(build_s) > NUM_STEPS // 2, f"only {len(build_s)} steps to measure"
    return 1e3 * statistics.median(build_s), 1e3 * statistics.median(commit_s)


def main() -> None:
    rows = []
    for case, (build_ms, commit_ms) in (
        ("128", measure(128)),
        ("32768", measure(32768)),
        ("layered", measure_layered()),
        ("told_1", measure_told(1)),
        ("told_15", measure_told(15)),
    ):
        for name, value, target in (
            ("schedule", build_ms, SCHEDULE_TARGET_MS),
            ("commit", commit_ms, COMMIT_TARGET_MS),
        ):
            rows.append(
                Row(name=f"tpot_host_{name}_{case}", value=value, unit="ms", target=target, lower_is_better=True)
            )
    report(rows)


if __name__ == "__main__":
    main()
