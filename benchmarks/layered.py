"""Latency of a server under load with prompts in chunks or by layers: Qwen3-30B-A3B's shape with random weights.

    layered_LOAD_MODE_FIGURE   ms, beside another mode on the same requests in this run: p99 of the time between tokens
                               (itl) and mean TTFT beside chunks; at the load `mixed`, mean TTFT of prompts under 512
                               tokens and from 4,096 on beside layers by the paper's rule

All figures of all modes are printed as they come. Loads are Poisson requests: `arxiv-like` and `sharegpt-like` as in
`jaxserve bench serve`, and `mixed` (a third has 8,192 tokens, the others 32 to 511; answers 100). Modes: chunks of 512,
2,048 and 8,192 tokens; layers by the paper's rule; layers to a target, with overtaking; auto.

    python -m benchmarks.layered [--load arxiv-like sharegpt-like mixed] [--rate 2 8 4] [--mode ...] [--requests 300]
        [--target-ms 25] [--model qwen3-30b-a3b] [--scale 1.0] [--save DIR]
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._report import Row, report
from jaxserve import LLM, SamplingParams
from jaxserve.cli.bench.metrics import experts_read, percentile
from jaxserve.cli.bench.serve import Run, TimedRequest, drive
from jaxserve.cli.bench.workload import DATASETS, arrival_times
from jaxserve.sampling_params import RequestOutputKind

RATES = {"arxiv-like": 2.0, "sharegpt-like": 8.0, "mixed": 4.0}
SHORT, LONG = 512, 4096
# Peer, figure, and how many times better it must be
MUSTS = (
    ("chunked_512", "itl_p99", 1.0),
    ("chunked_512", "ttft_mean", 2.0),
    ("chunked_8192", "ttft_mean", 1 / 1.4),
    ("chunked_512", "expert_gb", 1 / 0.65),
)
OVERTAKING = (("layered", "ttft_short_mean", 1 / 0.4), ("layered", "ttft_long_mean", 1 / 1.15))


def modes(target_ms: float) -> dict[str, dict[str, Any]]:
    """The options of each mode, beside a budget of 8,192 tokens."""
    by_target = {"target_tbt_ms": target_ms, "prefill_order": "shortest"}
    return {
        "chunked_512": {"max_num_batched_tokens": 512},
        "chunked_2048": {"max_num_batched_tokens": 2048},
        "chunked_8192": {},
        "layered": {"prefill": "layered"},
        "layered_target": {"prefill": "layered", **by_target},
        "auto": {"prefill": "auto", **by_target},
    }


def lengths(load: str, rng: np.random.Generator) -> tuple[int, int]:
    """Tokens of a prompt and of its answer."""
    if load in DATASETS:
        prompt, answer = (int(of.draw(1, rng)[0]) for of in DATASETS[load])
        return prompt, answer
    return (8192 if rng.random() < 1 / 3 else int(rng.integers(32, SHORT))), 100


def requests(load: str, count: int, scale: float, vocab_size: int) -> list[TimedRequest]:
    rng = np.random.default_rng(0)
    found = []
    for _ in range(count):
        prompt_len, answer_len = (max(2, int(n * scale)) for n in lengths(load, rng))
        params = SamplingParams(
            temperature=0.0,
            max_tokens=min(answer_len, 2048),
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        found.append(TimedRequest(prompt_token_ids=rng.integers(0, vocab_size, prompt_len).tolist(), params=params))
    return found


def figures(run: Run, scale: float) -> dict[str, float]:
    """In ms, by name; `expert_gb` are the weights of experts that are read for a request, in GB."""
    served = [record for record in run.records if not record.failed]
    gaps = [gap for record in served for gap in record.itls_s]
    ttfts = {
        "ttft": [record.ttft_s for record in served],
        "ttft_short": [record.ttft_s for record in served if record.prompt_len < SHORT * scale],
        "ttft_long": [record.ttft_s for record in served if record.prompt_len >= LONG * scale],
    }
    found = {f"{name}_mean": statistics.fmean(values) for name, values in ttfts.items() if values}
    found |= {"ttft_p99": percentile(ttfts["ttft"], 99), "itl_mean": statistics.fmean(gaps)}
    found |= {"itl_p99": percentile(gaps, 99)}
    by_name = {name: 1e3 * value for name, value in found.items()}
    experts = experts_read(run.steps, len(served))
    return by_name | ({"expert_gb": experts["expert_bytes_per_request"] / 1e9} if experts else {})


def run(options: argparse.Namespace) -> dict[tuple[str, str], dict[str, float]]:
    """The figures of each (mode, load)."""
    found = {}
    for mode in options.mode:
        engine = {"max_num_batched_tokens": 8192, **modes(options.target_ms)[mode]}
        engine["max_num_batched_tokens"] = max(64, int(engine["max_num_batched_tokens"] * options.scale))
        with LLM(
            options.model,
            load_format="dummy",
            max_model_len=int(33_000 * options.scale),
            enable_prefix_caching=False,
            prioritize_prefill=False,
            warm_up="blocking",
            **engine,
        ) as llm:
            for load, rate in zip(options.load, options.rate, strict=True):
                timed = requests(load, options.requests, options.scale, llm.llm_engine.core.limits().vocab_size)
                drive(llm.llm_engine, timed[:8], [0.0] * 8)
                arrivals = arrival_times(len(timed), rate, 1.0, np.random.default_rng(1))
                found[mode, load] = figures(drive(llm.llm_engine, timed, arrivals), options.scale)
                values = (f"{name} {value:.4g}" for name, value in found[mode, load].items())
                print(f"{mode}, {load} at {rate:g}/s:", *values, flush=True)
            stalls = llm.get_metrics()["jaxserve:num_stalls"]
            if stalls:
                print(f"{mode}: {stalls:g} steps waited for a compile")
    return found


def compared(found: dict[tuple[str, str], dict[str, float]]) -> list[Row]:
    """What is to hold between two modes, where both ran."""
    return [
        Row(
            name=f"layered_{load}_{mode}_{name}; peer: {peer}",
            value=values[name],
            unit="GB" if name == "expert_gb" else "ms",
            peer=found[peer, load][name],
            target=ratio,
            lower_is_better=True,
        )
        for (mode, load), values in found.items()
        for peer, name, ratio in (OVERTAKING if load == "mixed" else MUSTS)
        if mode not in ("chunked_512", "chunked_2048", "chunked_8192", peer) and (peer, load) in found
        if name in values
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--rate", nargs="+", type=float, help="requests a second, one a load")
    parser.add_argument("--mode", nargs="+", choices=list(modes(0)), default=list(modes(0)))
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--target-ms", type=float, default=25.0)
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths, to try this on a small machine")
    parser.add_argument("--save", type=Path, help="folder for the rows as layered.jsonl")
    options = parser.parse_args()
    options.rate = options.rate or [RATES[load] for load in options.load]
    report(compared(run(options)), save=options.save and options.save / "layered.jsonl")


if __name__ == "__main__":
    main()
