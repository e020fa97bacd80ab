"""Offline throughput and online latency on one GPU: well-known shapes with random weights, beside vLLM's figures.

    offline_512        tokens a second, in and out, of 512 requests of 256 to 1,535 tokens with answers of 192
    offline_qwen3_30b_512  the same of a mixture of experts; all others are of Llama-3.1-8B
    online_rR_bB_*     40 Poisson requests at R a second, 2,048 to 6,144 tokens in, 128 out, token budget B: mean and
                       p99 of TTFT and of the time between tokens (itl), in ms, each the mean over three seeds

The peer, vLLM 0.23 on one H200 (bfloat16, CUDA graphs, prefix caching off), was measured with the same settings:
greedy, ignore_eos, no detokenising, in-process step loop, max_num_seqs 256, memory 0.85, offline budget 8192.

    python -m benchmarks.serving [--only offline offline_moe online] [--save DIR]
"""

import argparse
import dataclasses
import statistics
import time
from pathlib import Path

import numpy as np

from benchmarks._report import Row, report
from benchmarks.tpot import LLAMA, QWEN, VOCAB_SIZE, Shape, engine
from jaxserve import LLM, SamplingParams
from jaxserve.cli.bench.metrics import percentile, samples_ms
from jaxserve.cli.bench.serve import TimedRequest, drive
from jaxserve.cli.bench.workload import arrival_times
from jaxserve.sampling_params import RequestOutputKind

SEEDS = (0, 1, 2)
OFFLINE = {LLAMA.name: (32_774, 1.15), QWEN.name: (31_136, 1.2)}  # vLLM's tok/s, and the stretch as a ratio to it


@dataclasses.dataclass(frozen=True)
class Online:
    """vLLM's figures in ms."""

    rate: float
    budget: int
    ttft_mean: float
    ttft_p99: float
    itl_mean: float
    itl_p99: float


ONLINE = (
    Online(2, 512, 133, 205, 5.8, 16.4),
    Online(2, 8192, 107, 163, 5.9, 19.1),
    Online(4, 512, 146, 262, 7.6, 17.1),
    Online(4, 2048, 126, 215, 8.4, 51.6),
    Online(4, 8192, 115, 199, 8.4, 98.6),
)


def sampling(num_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        max_tokens=num_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def prompts(num: int, low: int, high: int, rng: np.random.Generator) -> list[list[int]]:
    """`num` prompts of low to high - 1 random tokens."""
    return [rng.integers(0, VOCAB_SIZE, length).tolist() for length in rng.integers(low, high, num)]


def offline(shape: Shape) -> Row:
    rng = np.random.default_rng(0)
    batch = prompts(512, 256, 1536, rng)
    with engine(shape=shape, warm_up="blocking") as llm:
        times = []
        for _ in range(2):
            began = time.perf_counter()
            llm.generate(batch, sampling(192), use_tqdm=False)
            times.append(time.perf_counter() - began)
        stalls = llm.get_metrics()["jaxserve:num_stalls"]
    assert not stalls, f"{stalls} steps waited for a compile, so this is no figure"
    rate = (sum(map(len, batch)) + 512 * 192) / min(times)
    peer, stretch = OFFLINE[shape.name]
    return Row(name=f"offline{shape.suffix}_512", value=rate, unit="tok/s", peer=peer, target=1.0, stretch=stretch)


def online_rows(llm: LLM, case: Online) -> list[Row]:
    found: dict[str, list[float]] = {"ttft_mean": [], "ttft_p99": [], "itl_mean": [], "itl_p99": []}
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        requests = [
            TimedRequest(prompt_token_ids=prompt, params=sampling(128)) for prompt in prompts(40, 2048, 6145, rng)
        ]
        run = drive(llm.llm_engine, requests, arrival_times(40, case.rate, 1.0, rng))
        samples = samples_ms(run.records)
        for measure in ("ttft", "itl"):
            found[f"{measure}_mean"].append(statistics.fmean(samples[measure]))
            found[f"{measure}_p99"].append(percentile(samples[measure], 99))
    return [
        Row(
            name=f"online_r{case.rate:g}_b{case.budget}_{name}",
            value=statistics.fmean(values),
            unit="ms",
            peer=getattr(case, name),
            target=1.0,
            lower_is_better=True,
        )
        for name, values in found.items()
    ]


def online() -> list[Row]:
    rows = []
    for budget in sorted({case.budget for case in ONLINE}):
        with engine(budget, prioritize_prefill=False, warm_up="blocking") as llm:
            llm.generate(prompts(8, 2048, 6145, np.random.default_rng(9)), sampling(16), use_tqdm=False)
            for case in ONLINE:
                if case.budget == budget:
                    rows += online_rows(llm, case)
                    print(*(f"{row.name} {row.value:.4g}" for row in rows[-4:]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=["offline", "offline_moe", "online"], help="default: all")
    parser.add_argument("--save", type=Path, help="folder for the rows as serving.jsonl")
    options = parser.parse_args()
    only, rows = options.only or ("offline", "offline_moe", "online"), []
    rows += [offline(shape) for name, shape in (("offline", LLAMA), ("offline_moe", QWEN)) if name in only]
    if "online" in only:
        rows += online()
    report(rows, save=options.save and options.save / "serving.jsonl")


if __name__ == "__main__":
    main()
