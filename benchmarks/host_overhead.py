"""Host time of one engine step with a null model: what the device never has to wait for.

256 running sequences decode under EngineCore and OutputProcessor; only the device's programs are replaced, by functions
that return at once. Reported for short and long contexts, since host time must not grow with them:

    schedule + build   Scheduler.schedule, and Runner.dispatch and sample, which pack the plan
    commit + outputs   the rest of the step: reading the tokens, the commit, detokenising, a DELTA output a sequence

    python -m benchmarks.host_overhead
"""

import statistics
import time

import numpy as np

from benchmarks._report import Row, report
from jaxserve.config import RunnerConfig
from jaxserve.core_types import CoreRequest
from jaxserve.engine_core import EngineCore
from jaxserve.layers.sampler import Sampled
from jaxserve.output_processor import OutputProcessor
from jaxserve.runner import Runner, default_shapes
from jaxserve.sampling_params import RequestOutputKind, SamplingParams
from jaxserve.scheduler import PagePool, Scheduler, SchedulerConfig
from jaxserve.weights.loader import open_tokenizer

NUM_SEQS, PAGE_SIZE, NUM_STEPS = 256, 64, 400
SCHEDULE_TARGET_MS, COMMIT_TARGET_MS = 0.3, 1.0


class HostArray(np.ndarray):
    def copy_to_host_async(self) -> None:
        pass


class NullPrograms:
    """Compiled programs that cover every key and do nothing."""

    def __init__(self, function):
        self._function = function

    def get(self, key):
        return key, self._function


class NullRunner(Runner):
    """A runner without device: packs plans as ever, and samples token 65 + slot % 26."""

    num_layers = 0

    def __init__(self, config: RunnerConfig):
        self.config, self._params, self._head, self._dummy = config, {}, {}, config.max_num_seqs
        self.shapes = default_shapes(config)
        self.kv, self._sequences, self._sampling = {}, None, None
        self._flags = np.zeros(config.max_num_seqs + 1, np.uint8)
        self._forward = NullPrograms(lambda params, kv, sequences, ints: (np.zeros(0), None, kv, sequences))
        self._sample = NullPrograms(self._null_sample)
        self._update_tables = NullPrograms(lambda sequences, rows: sequences)
        self._start_slots = NullPrograms(lambda sequences, sampling, ints, floats: (sequences, sampling))

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


def measure(context_len: int) -> tuple[float, float]:
    """Median milliseconds of (schedule + build, commit + outputs) at `context_len` tokens a sequence."""
    pages = NUM_SEQS * (-(-(context_len + NUM_STEPS + 8) // PAGE_SIZE)) + 1
    scheduler_config = SchedulerConfig(
        max_num_seqs=NUM_SEQS, max_num_batched_tokens=64 * context_len, max_model_len=context_len + NUM_STEPS + 8
    )
    runner_config = RunnerConfig(
        max_num_seqs=NUM_SEQS,
        max_model_len=context_len + NUM_STEPS + 8,
        page_size=PAGE_SIZE,
        num_pages=pages,
        max_logprobs=20,
        min_decode_rows=2,
        mixed_decode_rows=(16, 64, 256),
        prefill_tokens=(64 * context_len,),
    )
    scheduler = Scheduler(scheduler_config, PagePool(num_pages=pages, page_size=PAGE_SIZE))
    runner = NullRunner(runner_config)
    core, outputs = EngineCore(scheduler, runner), OutputProcessor(open_tokenizer("smollm2-135m", revision=None))
    build = Stopwatch()
    scheduler.schedule = build.timed(scheduler.schedule)
    runner.dispatch, runner.sample = build.timed(runner.dispatch), build.timed(runner.sample)
    params = SamplingParams(
        temperature=0.0, max_tokens=NUM_STEPS + 4, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    for i in range(NUM_SEQS):
        request = CoreRequest(seq_id=i, prompt_token_ids=[i] * context_len, params=params, eos_token_ids=[])
        outputs.add(str(i), None, [request])
        core.add_request(request)
    build_s, commit_s = [], []
    while core.has_unfinished():
        start, build.total_s = time.perf_counter(), 0.0
        done, _ = outputs.process(core.step(), start)
        if len(done) == len(scheduler.running) == NUM_SEQS:
            build_s.append(build.total_s)
            commit_s.append(time.perf_counter() - start - build.total_s)
    assert len(build_s) > NUM_STEPS // 2, f"only {len(build_s)} steady steps to measure"
    return 1e3 * statistics.median(build_s), 1e3 * statistics.median(commit_s)


def main() -> None:
    rows = []
    for context_len in (128, 32768):
        build_ms, commit_ms = measure(context_len)
        rows += [
            Row(
                name=f"tpot_host_schedule_{context_len}",
                value=build_ms,
                unit="ms",
                target=SCHEDULE_TARGET_MS,
                lower_is_better=True,
            ),
            Row(
                name=f"tpot_host_commit_{context_len}",
                value=commit_ms,
                unit="ms",
                target=COMMIT_TARGET_MS,
                lower_is_better=True,
            ),
        ]
    report(rows)


if __name__ == "__main__":
    main()
