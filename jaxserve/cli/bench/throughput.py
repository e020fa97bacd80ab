"""`jaxserve bench throughput`: many requests handed over at once."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxserve.cli import engine as driver
from jaxserve.cli.bench import engine as bench_engine
from jaxserve.cli.bench.energy import Energy, used
from jaxserve.cli.options import ENGINE_OPTIONS, ProfileOption, takes
from jaxserve.cli.output import require_writable, show

if TYPE_CHECKING:
    from jaxserve import LLM
    from jaxserve.cli.bench.workload import SyntheticRequest


@takes(engine=ENGINE_OPTIONS, workload=bench_engine.WORKLOAD_OPTIONS)
def throughput(
    engine: dict[str, Any],
    workload: dict[str, Any],
    num_warmups: Annotated[int, typer.Option(min=0, help="Requests before the measured ones.")] = 0,
    output_json: Annotated[Path | None, typer.Option(help="Write the result to this file, too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    profile: ProfileOption = None,
) -> None:
    """Time all requests together. The clock runs from handing them over to the last token."""
    require_writable(output_json)
    bench_engine.require_known(workload)
    rng = bench_engine.generator(workload["seed"])
    with bench_engine.start(engine) as llm:
        if num_warmups:
            _run(llm, bench_engine.requests(llm.llm_engine, {**workload, "num_prompts": num_warmups}, rng))
        requests = bench_engine.requests(llm.llm_engine, workload, rng)
        with driver.profiled(llm, profile):
            energy = Energy()
            elapsed_s, output_tokens = _run(llm, requests)
            joules = energy.joules()
    prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
    result = summary(len(requests), prompt_tokens, output_tokens, elapsed_s)
    result |= used(joules, prompt_tokens + output_tokens)
    show(result, "throughput", as_json=as_json, file=output_json)


def summary(num_requests: int, prompt_tokens: int, output_tokens: int, elapsed_s: float) -> dict[str, Any]:
    """The fields of `vllm bench throughput`, and the output tokens by themselves."""
    return {
        "elapsed_time": elapsed_s,
        "num_requests": num_requests,
        "total_num_tokens": prompt_tokens + output_tokens,
        "requests_per_second": num_requests / elapsed_s,
        "tokens_per_second": (prompt_tokens + output_tokens) / elapsed_s,
        "output_tokens_per_second": output_tokens / elapsed_s,
    }


def _run(llm: "LLM", requests: "list[SyntheticRequest]") -> tuple[float, int]:
    params = [bench_engine.greedy(request.output_len) for request in requests]
    began = time.perf_counter()
    outputs = llm.generate([request.prompt_token_ids for request in requests], params)
    return time.perf_counter() - began, sum(len(output.outputs[0].token_ids) for output in outputs)
