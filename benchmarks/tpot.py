"""Time a token on one GPU: a well-known shape with random weights, beside vLLM's figures on an H200.

    tpot_BxC           (time of 65 tokens - time of 1) / 64 over whole calls of `generate`, B sequences of C tokens: the
                       prefill of a large batch is staggered inside it, as it is in the peer's figure
    tpot_BxC_decode    the same from 64 steps that only decode
    prefill_64x1024    tokens a second of the call that makes one token each
    tpot_card_*        what this card reads and multiplies, beside the one that the peer's figures are of: cards differ
    start              `LLM(...)` to ready, with every default program compiled or found in the compile cache; the peer
                       is vLLM's start with CUDA graphs
    qwen3_30b_*        the same of a mixture of experts
    *_kv1_tp2          the same on two GPUs, with this many ranks of KV and tensor parallelism

The peer, vLLM 0.23 on one H200 (bfloat16, CUDA graphs, prefix caching off), was measured with the same settings:
greedy, ignore_eos, no detokenising, in-process step loop, max_num_seqs 256, token budget 8192, memory 0.85.

    python -m benchmarks.tpot [--model qwen3-30b-a3b] [--only 64x1024 ...] [--warm-up off] [--cache DIR] [--save DIR]
                              [--tensor-parallel-size 2 | --kv-parallel-size 2]
"""

import argparse
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks._report import Row, report
from jaxserve import LLM, SamplingParams

VOCAB_SIZE, NUM_STEPS = 128_000, 64
Goals = tuple[float, float, float]  # peer, must, stretch


@dataclasses.dataclass(frozen=True)
class Case:
    batch: int
    context: int
    goals_ms: Goals | None  # None: no peer was measured


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A model, what vLLM reached with it, and what is to be reached."""

    name: str
    suffix: str  # of the names of rows
    max_model_len: int
    cases: tuple[Case, ...]
    prefill: Goals | None  # tok/s
    start: Goals | None  # seconds with an empty compile cache


LLAMA = Shape(
    name="llama-3.1-8b",
    suffix="",
    max_model_len=121_000,
    cases=(
        Case(1, 128, (4.77, 4.4, 4.2)),
        Case(16, 128, (5.05, 4.6, 4.3)),
        Case(64, 1024, (7.73, 7.0, 6.6)),
        Case(256, 1024, (18.8, 16.0, 14.5)),
        Case(8, 32_000, (12.9, 12.3, 12.0)),
        Case(1, 120_000, (8.34, 8.1, 7.9)),
    ),
    prefill=(43_200, 43_200, 47_000),
    start=(92.0, 45.0, 25.0),
)
QWEN = Shape(
    name="qwen3-30b-a3b",
    suffix="_qwen3_30b",
    max_model_len=33_000,
    cases=(
        Case(1, 128, (4.31, 4.0, 3.2)),
        Case(16, 128, (12.5, 12.0, 10.5)),
        Case(64, 1024, (18.9, 18.3, 16.5)),
        Case(256, 1024, (26.7, 25.0, 22.0)),
        Case(1, 32_000, (5.08, 4.7, 4.0)),
    ),
    prefill=(67_600, 67_600, 67_600),
    start=(120.0, 120.0, 120.0),
)
SHAPES = {shape.name: shape for shape in (LLAMA, QWEN)}
LLAMA_ON_TWO = dataclasses.replace(  # beside vLLM with tensor_parallel_size 2 and its one-shot all-reduce
    LLAMA,
    cases=(
        Case(1, 128, (3.50, 3.9, 3.3)),
        Case(16, 128, (3.69, 4.1, 3.5)),
        Case(64, 1024, (5.03, 5.5, 4.8)),
        Case(256, 1024, (11.3, 12.0, 10.5)),
        Case(8, 32_000, (7.76, 8.3, 7.4)),
        Case(1, 120_000, (5.39, 5.8, 5.1)),
    ),
    prefill=(64_000, 64_000, 71_200),
    start=None,
)
REST_S = 1.0  # before each call: seconds of prefill heat the card, and the next seconds are up to 3 % slower


def engine(budget: int = 8192, *, shape: Shape = LLAMA, **options: Any) -> LLM:
    """The engine that all of these figures are of."""
    return LLM(
        shape.name,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=shape.max_model_len,
        max_num_seqs=256,
        max_num_batched_tokens=budget,
        device_memory_utilization=0.85,
        enable_prefix_caching=False,
        **options,
    )


def prompts(case: Case) -> list[list[int]]:
    rng = np.random.default_rng(case.batch)
    return [rng.integers(0, VOCAB_SIZE, case.context).tolist() for _ in range(case.batch)]


def sampling(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)


def generate_s(llm: LLM, case: Case, num_tokens: int) -> float:
    time.sleep(REST_S)
    began = time.perf_counter()
    llm.generate(prompts(case), sampling(num_tokens), use_tqdm=False)
    return time.perf_counter() - began


def decode_s(llm: LLM, case: Case) -> float:
    """Seconds a step, over steps in which every sequence decodes and none is read in."""
    engine = llm.llm_engine
    for i, prompt in enumerate(prompts(case)):
        engine.add_request(str(i), prompt, sampling(NUM_STEPS + 200))
    for _ in range(2):
        while len(engine.step()) < case.batch:  # each step gives a token of every sequence that decodes
            pass
        engine.core.runner.wait_for_programs()  # without warm-up a larger one stands in at first
    began = time.perf_counter()
    for _ in range(NUM_STEPS):
        assert len(engine.step()) == case.batch, "a sequence ended, or did not decode, in the time that is measured"
    elapsed = time.perf_counter() - began
    engine.abort_request([str(i) for i in range(case.batch)])
    while engine.has_unfinished_requests():
        engine.step()
    return elapsed / NUM_STEPS


def on_mesh(shape: Shape, kv: int, tp: int) -> Shape:
    """The shape with what the peer reached on as many GPUs, if it was measured."""
    if kv * tp == 1:
        return shape
    if shape is LLAMA and kv * tp == 2:
        shape = LLAMA_ON_TWO
    else:
        cases = tuple(dataclasses.replace(case, goals_ms=None) for case in shape.cases)
        shape = dataclasses.replace(shape, cases=cases, prefill=None, start=None)
    return dataclasses.replace(shape, suffix=f"{shape.suffix}_kv{kv}_tp{tp}")


def against(goals: Goals | None, *, lower_is_better: bool = False) -> dict[str, Any]:
    """Peer, must and stretch as a row has them: as ratios to the peer."""
    if goals is None:
        return {}
    peer, *others = goals
    target, stretch = (peer / other if lower_is_better else other / peer for other in others)
    return {"peer": peer, "target": target, "stretch": stretch}


def measure(llm: LLM, case: Case, shape: Shape) -> list[Row]:
    name = f"tpot{shape.suffix}_{case.batch}x{case.context}"
    goals = against(case.goals_ms, lower_is_better=True)
    how = {"unit": "ms", "lower_is_better": True, **goals}
    repeats = range(max(1, min(8, 2**17 // (case.batch * case.context))))
    decode = min(decode_s(llm, case) for _ in repeats)
    pairs = [(generate_s(llm, case, 1), generate_s(llm, case, NUM_STEPS + 1)) for _ in repeats]
    one, many = (min(times) for times in zip(*pairs, strict=True))
    rows = [
        Row(name=name, value=1e3 * (many - one) / NUM_STEPS, **how),
        Row(name=f"{name}_decode", value=1e3 * decode, **how),
    ]
    if (case.batch, case.context) == (64, 1024):
        rate = case.batch * case.context / one
        rows.append(Row(name=f"prefill{shape.suffix}_64x1024", value=rate, unit="tok/s", **against(shape.prefill)))
    return rows


def card_rows() -> list[Row]:
    """A sweep that reads 4.3 GB, and a bfloat16 matmul of 8192^3 with random values, which power limits."""
    x = jnp.ones((2048, 2**20), jnp.bfloat16)
    read_s = device_s(jax.jit(lambda x: x.astype(jnp.float32).sum()), x)
    w = jax.random.normal(jax.random.key(0), (8192, 8192), jnp.bfloat16)
    matmul_s = device_s(jax.jit(lambda w: w @ w), w)
    return [
        Row(name="tpot_card_read", value=x.nbytes / read_s / 1e12, unit="TB/s", peer=4.11, target=1.0),
        Row(name="tpot_card_matmul", value=2 * 8192**3 / matmul_s / 1e12, unit="TFLOP/s", peer=715, target=1.0),
    ]


def device_s(function: Callable[[Array], Array], x: Array) -> float:
    """Seconds of one call of twenty in a row."""
    function(x).block_until_ready()
    began = time.perf_counter()
    for _ in range(19):
        function(x)
    function(x).block_until_ready()
    return (time.perf_counter() - began) / 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SHAPES), default=LLAMA.name)
    parser.add_argument("--only", nargs="*", help="such as 64x1024")
    parser.add_argument("--warm-up", default="blocking", choices=["blocking", "off"])
    parser.add_argument("--cache", default=None, help="compile cache; an empty folder measures a cold start")
    parser.add_argument("--save", type=Path, help="folder for the rows as tpot.jsonl")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--kv-parallel-size", type=int, default=1)
    options = parser.parse_args()
    kv, tp = options.kv_parallel_size, options.tensor_parallel_size
    shape = on_mesh(SHAPES[options.model], kv, tp)
    card = card_rows()
    began = time.perf_counter()
    cache = {} if options.cache is None else {"compilation_cache_dir": options.cache}
    sizes = {"kv_parallel_size": kv, "tensor_parallel_size": tp}
    llm = engine(shape=shape, warm_up=options.warm_up, **sizes, **cache)
    started = time.perf_counter() - began
    print({name: round(value, 2) for name, value in llm.get_metrics().items() if "start_" in name}, flush=True)
    start = against(shape.start, lower_is_better=True)
    rows = [*card, Row(name=f"start{shape.suffix}", value=started, unit="s", lower_is_better=True, **start)]
    try:
        with llm:
            for case in shape.cases:
                if not options.only or f"{case.batch}x{case.context}" in options.only:
                    rows += measure(llm, case, shape)
                    print(*(f"{row.name} {row.value:.4g} {row.unit} ({row.met})" for row in rows[-3:]), flush=True)
    finally:  # an interrupt leaves what is measured
        report(rows, save=options.save and options.save / f"tpot{shape.suffix}.jsonl")


if __name__ == "__main__":
    main()
