"""`jaxserve bench latency`: the time of one batch, from prompts to the last token."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxserve.cli import engine as driver
from jaxserve.cli.bench import engine as bench_engine
from jaxserve.cli.bench.metrics import percentile
from jaxserve.cli.options import ENGINE_OPTIONS, ProfileOption, takes
from jaxserve.cli.output import require_writable, show

PERCENTS = (10, 25, 50, 75, 90, 99)


@takes(engine=ENGINE_OPTIONS)
def latency(
    engine: dict[str, Any],
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 32,
    output_len: Annotated[int, typer.Option(help="Tokens of each answer.")] = 128,
    batch_size: Annotated[int, typer.Option(help="Prompts of one batch.")] = 8,
    num_iters_warmup: Annotated[int, typer.Option(min=0, help="Batches before the measured ones.")] = 2,
    num_iters: Annotated[int, typer.Option(min=1, help="Measured batches.")] = 10,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    output_json: Annotated[Path | None, typer.Option(help="Write the result to this file, too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    profile: ProfileOption = None,
) -> None:
    """Time batches of prompts of one length, one after another."""
    require_writable(output_json)
    rng = bench_engine.generator(seed)
    params = bench_engine.greedy(output_len)
    lens = {"num_prompts": batch_size, "random_input_len": input_len, "random_output_len": output_len}
    workload = {**lens, "dataset_name": "random", "random_range_ratio": 0.0, "random_prefix_len": 0}
    num_batches = num_iters_warmup + num_iters
    with bench_engine.start(engine) as llm, bench_engine.counting("batches", num_batches) as one_done:

        def run_batch() -> float:
            prompts = bench_engine.requests(
                llm.llm_engine, workload, rng
            )  # new ones, so that no prefix is in the cache
            began = time.perf_counter()
            llm.generate([prompt.prompt_token_ids for prompt in prompts], params, use_tqdm=False)
            elapsed_s = time.perf_counter() - began
            one_done()
            return elapsed_s

        for _ in range(num_iters_warmup):
            run_batch()
        with driver.profiled(llm, profile):
            latencies = [run_batch() for _ in range(num_iters)]
    show(
        summary(latencies),
        f"latency in s of {batch_size} x {input_len}+{output_len}",
        as_json=as_json,
        file=output_json,
    )


def summary(latencies: list[float]) -> dict[str, Any]:
    """`{"avg_latency", "latencies", "percentiles": {"50": ...}}`, in seconds."""
    percentiles = {str(percent): percentile(latencies, percent) for percent in PERCENTS}
    return {"avg_latency": sum(latencies) / len(latencies), "latencies": latencies, "percentiles": percentiles}
