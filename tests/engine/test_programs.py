"""The compile guard: which program a step gets, and what counts as a stall."""

import contextlib
import dataclasses
import logging
import threading

import jax
import pytest
from one_layer import LLAMA

from jaxserve import SamplingParams
from jaxserve.config import (
    DeviceMemory,
    EngineConfig,
    NoRoomError,
    kv_bytes_per_token,
    prefill_seqs,
    resolve,
    state_bytes,
)
from jaxserve.layers.sampler import SamplingFeatures
from jaxserve.models import get_model
from jaxserve.program_set import default_shapes
from jaxserve.programs import Compiler, Programs
from jaxserve.step_programs import SampleShape, StepShape


@dataclasses.dataclass(frozen=True)
class Size:
    n: int

    def covers(self, other):
        return self.n >= other.n

    @property
    def cost(self):
        return self.n


@pytest.fixture
def compiler():
    compiler = Compiler(1, contextlib.nullcontext)
    yield compiler
    compiler.close()


def test_the_exact_program_is_compiled_once(compiler):
    built = []
    programs = Programs("p", lambda key, _: built.append(key) or (lambda: key), compiler, None)
    assert programs.get(Size(3))[1]() == Size(3)
    assert programs.get(Size(3))[1]() == Size(3)
    assert built == [Size(3)]


def test_a_larger_ready_program_stands_in_while_the_exact_one_compiles(compiler):
    gate = threading.Event()

    def build(key, _):
        if key == Size(2):
            gate.wait(10)
        return lambda: key

    programs = Programs("p", build, compiler, None)
    for job in programs.request([Size(16), Size(8)]):
        job.result(10)
    key, program = programs.get(Size(2))
    assert key == program() == Size(8)  # the smallest that covers
    gate.set()
    (job,) = programs.request([Size(2)])
    job.result(10)
    assert programs.get(Size(2))[0] == Size(2)


def test_a_larger_program_stands_in_until_what_steps_asked_for_is_waited_for(make_llm):
    llm = make_llm()
    engine = llm.llm_engine
    engine.add_request("0", [3, 4, 5], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, detokenize=False))
    engine.step()
    decode = engine.core.runner.shapes[0]
    assert (decode.decode_rows, decode.prefill_tokens) == (2, 0)
    while len(engine.step()) < 1:
        pass
    engine.core.runner.wait_for_programs()
    assert engine.core.runner.device.forward.is_ready(decode)
    llm.close()


def test_a_smaller_program_never_stands_in(compiler):
    programs = Programs("p", lambda key, _: lambda: key, compiler, None)
    programs.get(Size(2))
    assert programs.get(Size(4))[0] == Size(4)


def test_a_wait_after_warm_up_is_counted_and_logged_with_its_shape(compiler, caplog):
    programs = Programs("forward", lambda key, _: lambda: key, compiler, None)
    programs.get(Size(4))
    assert programs.num_stalls == 0
    programs.warm = True
    programs.get(Size(4))
    programs.get(Size(2))
    assert programs.num_stalls == 0
    with caplog.at_level(logging.WARNING):
        programs.get(Size(9))
    assert programs.num_stalls == 1
    assert "forward Size(n=9)" in caplog.text


def test_an_error_of_the_compiler_reaches_the_step(compiler):
    def build(key, _):
        raise RuntimeError("no such instruction")

    programs = Programs("p", build, compiler, None)
    with pytest.raises(RuntimeError, match="no such instruction"):
        programs.get(Size(1))
    (job,) = programs.request([Size(2)])
    with pytest.raises(RuntimeError, match="no such instruction"):
        job.result(10)


def test_the_default_programs_cover_every_plan_and_are_few(llm):
    runner, config = llm.llm_engine.core.runner, llm.llm_engine.core.runner.config
    for rows in range(config.max_num_seqs + 1):
        for tokens in range(65):
            for seqs in {0, 1, min(tokens, prefill_seqs(config.prefill_tokens[-1]))}:
                if rows + tokens and (tokens > 0) == (seqs > 0):
                    plan = StepShape(decode_rows=rows, prefill_tokens=tokens, prefill_seqs=seqs)
                    assert any(shape.covers(plan) for shape in runner.shapes)


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("max_num_seqs", [1, 17, 32, 256])
@pytest.mark.parametrize("budget", [256, 511, 512, 6000, 8192])
def test_programs_cover_every_plan_that_the_budget_allows(backend, max_num_seqs, budget, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    options = {"num_pages": 4096, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget}
    engine_config = EngineConfig.of("m", max_model_len=64, **options)
    scheduler, config = resolve(engine_config, get_model(LLAMA).config, params_bytes=0)
    shapes = default_shapes(config)
    assert [shape.cost for shape in shapes] == sorted(shape.cost for shape in shapes)
    for rows in {*range(0, max_num_seqs, 7), min(16, max_num_seqs), min(17, max_num_seqs), max_num_seqs}:
        left = budget - scheduler.tokens_for(rows)
        for tokens in {t for t in (0, 1, left // 2, left) if t >= 0 and rows + t}:
            for seqs in {min(tokens, 1), min(tokens, scheduler.max_prefill_seqs)}:
                plan = StepShape(decode_rows=rows, prefill_tokens=tokens, prefill_seqs=seqs)
                found = next(shape for shape in shapes if shape.covers(plan))
                if budget >= 512 and tokens:  # no step is larger than its budget, rounded up
                    assert found.cost <= config.prefill_tokens[-1]


def test_the_pool_leaves_room_for_the_state_of_the_slots():
    model, device = get_model(LLAMA).config, DeviceMemory(platform="gpu", limit_bytes=2**26)

    def num_pages(max_num_seqs: int, **options: int) -> int:
        config = EngineConfig.of("m", max_model_len=64, max_num_seqs=max_num_seqs, **options)
        return resolve(config, model, params_bytes=0, device=device)[1].num_pages

    page_bytes = 64 * kv_bytes_per_token(model, "bfloat16", "gpu")
    state = state_bytes(1000, 1, model.vocab_size) - state_bytes(1, 1, model.vocab_size)
    assert (num_pages(1) - num_pages(1000)) * page_bytes == pytest.approx(state, abs=page_bytes)
    assert state > 2 * page_bytes
    assert num_pages(1000, kv_cache_memory_bytes=10 * page_bytes) == 10  # what is asked for is given
    with pytest.raises(NoRoomError, match=r"0 bytes are left after 0 bytes of weights and \d+ of state for 16384 seq"):
        num_pages(2**14, device_memory_utilization=0.01)


def test_a_thread_is_in_its_context_while_there_is_work():
    entered = threading.Semaphore(0)
    events, go = [], threading.Event()

    @contextlib.contextmanager
    def context():
        events.append("in")
        yield len(events)
        events.append("out")
        entered.release()

    compiler = Compiler(1, context)
    first = compiler.submit(lambda tool: go.wait(10) and events.append(tool))
    second = compiler.submit(lambda tool: events.append(tool))
    go.set()
    first.result(10)
    second.result(10)
    assert entered.acquire(timeout=10)
    assert events == ["in", 1, 1, "out"]
    compiler.submit(lambda tool: events.append(tool)).result(10)
    compiler.close()
    assert events[4:] == ["in", 5, "out"]


def test_the_default_warm_up_compiles_at_most_48_programs(make_llm):
    llm = make_llm(max_num_seqs=32, max_num_batched_tokens=512)  # the CPU's defaults
    runner = llm.llm_engine.core.runner
    runner.warm_up(block=False)
    assert len(runner._warm_up_jobs) <= 48
    llm.close()


def test_a_sample_program_with_more_features_covers_one_with_fewer():
    shape = StepShape(decode_rows=16, prefill_tokens=64, prefill_seqs=8)
    assert shape.sample_rows == 32
    every = SampleShape(rows=32, features=SamplingFeatures(random=True, edits=True, num_logprobs=5))
    greedy = SampleShape(rows=32, features=SamplingFeatures())
    assert every.covers(greedy)
    assert not greedy.covers(every)
    assert not every.covers(SampleShape(rows=16, features=SamplingFeatures()))
    assert not every.covers(SampleShape(rows=32, features=SamplingFeatures(num_logprobs=6)))
