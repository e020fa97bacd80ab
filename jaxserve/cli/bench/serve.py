"""`jaxserve bench serve`: requests that arrive over time, as users would send them."""

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from jaxserve.cli import engine as driver
from jaxserve.cli.bench import engine as bench_engine
from jaxserve.cli.bench.energy import Energy, used
from jaxserve.cli.bench.metrics import RequestRecord, experts_read, parse_goodput, parse_percentiles, summary
from jaxserve.cli.options import ENGINE_OPTIONS, ProfileOption, takes
from jaxserve.cli.output import require_writable, show
from jaxserve.exceptions import RequestError
from jaxserve.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from jaxserve import LLMEngine, RequestOutput
    from jaxserve.cli.bench.workload import SyntheticRequest
    from jaxserve.metrics import StepRecord


@takes(engine=ENGINE_OPTIONS, workload=bench_engine.WORKLOAD_OPTIONS)
def serve(
    engine: dict[str, Any],
    workload: dict[str, Any],
    request_rate: Annotated[float, typer.Option(help="Requests per second; inf sends all at once.")] = float("inf"),
    burstiness: Annotated[float, typer.Option(help="Shape of the gamma gaps: 1 is Poisson, less is burstier.")] = 1.0,
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Most requests in the engine at once.")] = None,
    num_warmups: Annotated[int, typer.Option(min=0, help="Requests before the measured ones.")] = 0,
    metric_percentiles: Annotated[str, typer.Option(help="Percentiles to report, separated by commas.")] = "99",
    goodput: Annotated[
        list[str] | None, typer.Option(help="Limits for a good request: NAME:MS, of ttft, tpot, e2el.")
    ] = None,
    more_goodput: Annotated[
        list[str] | None, typer.Argument(hidden=True, metavar="NAME:MS")
    ] = None,  # --goodput ttft:200 tpot:50
    sweep_rate: Annotated[
        bool,
        typer.Option(help="Find the highest rate at which 90 % of the requests are good; starts at --request-rate."),
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the distributions and the steps, or the sweep, into this file.")
    ] = None,
    output_json: Annotated[Path | None, typer.Option(help="Write the result to this file, too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    profile: ProfileOption = None,
) -> None:
    """Send requests at random times and time what a client sees.

    TTFT: time to first token. TPOT: time per output token after the first. ITL: inter-token latency, each single gap
    between two tokens. E2EL: end-to-end latency, until the last token.

    Goodput: the requests a second that meet all limits, for instance --goodput ttft:200 tpot:50 (milliseconds).

    With --sweep-rate the same requests come at one rate after the other.
    """
    from jaxserve.cli.bench import sweep
    from jaxserve.cli.bench.plot import draw, require_drawable
    from jaxserve.cli.bench.workload import arrival_times

    percents = parse_percentiles(metric_percentiles)
    limits = parse_goodput([*(goodput or []), *(more_goodput or [])])
    if sweep_rate and not (limits and math.isfinite(request_rate)):
        raise ValueError("--sweep-rate needs --goodput, and a --request-rate to begin with, such as 1")
    bench_engine.require_known(workload)
    rng = bench_engine.generator(workload["seed"])
    first = arrival_times(workload["num_prompts"], request_rate, burstiness, rng)
    require_writable(output_json)
    if plot:
        require_drawable(plot)
    with bench_engine.start({"prioritize_prefill": False, **engine}) as llm:  # as a server has it
        if num_warmups:
            warm = bench_engine.requests(llm.llm_engine, {**workload, "num_prompts": num_warmups}, rng)
            with bench_engine.counting("warm-up requests", num_warmups) as one_done:
                drive(llm.llm_engine, [_request(r) for r in warm], [0.0] * num_warmups, on_end=one_done)
        requests = [_request(r) for r in bench_engine.requests(llm.llm_engine, workload, rng)]

        def measure(rate: float) -> Run:
            if sweep_rate:  # else the prompts of the run before would be in the prefix cache
                llm.llm_engine.settle()
                llm.llm_engine.reset_prefix_cache()
            arrivals = first if rate == request_rate else [at * request_rate / rate for at in first]
            what = f"requests at {rate:.3g}/s" if sweep_rate else "requests"
            with bench_engine.counting(what, len(requests)) as one_done:
                return drive(llm.llm_engine, requests, arrivals, max_concurrency=max_concurrency, on_end=one_done)

        with driver.profiled(llm, profile):
            if sweep_rate:
                runs: list[Run] = []

                def point(rate: float) -> sweep.Point:
                    runs.append(measure(rate))
                    return sweep.point(runs[-1], rate, limits)

                points = sweep.sweep(point, request_rate)
            else:
                energy = Energy()
                run = measure(request_rate)
                joules = energy.joules()
    if sweep_rate:
        if not as_json:
            sweep.print_points(points)
        show(sweep.result(points), "bench serve", as_json=as_json, file=output_json)
        if plot:
            sweep.draw_front(points, plot)
        run = runs[0]
        if all(record.failed for record in run.records):
            _say_that_all_failed(run)
        return
    result = summary(run.records, run.duration_s, percents=percents, goodput_ms=limits)
    result |= experts_read(run.steps, result["completed"])
    result |= used(joules, result["total_input_tokens"] + result["total_output_tokens"])
    show(result, f"bench serve, {request_rate:g} requests/s", as_json=as_json, file=output_json)
    if plot:
        draw(run, plot, goodput_ms=limits)
    if not result["completed"]:
        _say_that_all_failed(run)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    records: list[RequestRecord]
    steps: "list[StepRecord]"
    start_time: float  # on the engine's clock, as the steps' times
    duration_s: float
    refusal: str | None = None  # why the engine refused the first request that it refused


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedRequest:
    prompt_token_ids: list[int]
    params: SamplingParams  # of output kind DELTA


def _say_that_all_failed(run: Run) -> NoReturn:
    reason = f", the first because {run.refusal}" if run.refusal else ""
    print(f"error: all {len(run.records)} requests failed{reason}", file=sys.stderr)
    raise typer.Exit(1)


def drive(
    engine: "LLMEngine",
    requests: Sequence[TimedRequest],
    arrivals: Sequence[float],
    *,
    max_concurrency: int | None = None,
    on_end: Callable[[], None] = lambda: None,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Run:
    """Runs the engine's step loop while requests arrive at their times, and records when each token came out.

    A request's clock starts at its arrival even where the engine, busy with a step or at `max_concurrency`, takes it
    later: waiting is part of what a user sees. A request that the engine refuses or ends with an error has failed.
    `on_end` is called as each request ends.
    """
    client = _Client(engine, requests, arrivals, on_end)
    steps = engine.recent_steps()[-1:]  # of an earlier run
    began = now()
    while client.num_left:
        client.send(now() - began, max_concurrency)
        if not client.num_running:
            sleep(max(0.0, client.next_arrival - (now() - began)))
            continue
        outputs = engine.step()
        client.receive(outputs, now() - began)
        steps += engine.recent_steps(since=steps[-1].step if steps else 0)
    return Run(
        records=client.records(),
        steps=[step for step in steps if step.start_time >= began],
        start_time=began,
        duration_s=now() - began,
        refusal=client.refusal,
    )


class _Client:
    """Sends requests when they are due and keeps the times of what comes back."""

    def __init__(
        self,
        engine: "LLMEngine",
        requests: Sequence[TimedRequest],
        arrivals: Sequence[float],
        on_end: Callable[[], None],
    ):
        self._engine, self._requests, self._arrivals, self._on_end = engine, requests, arrivals, on_end
        self._token_times: list[list[float]] = [[] for _ in requests]
        self._failed = [False] * len(requests)
        self._num_sent = 0
        self.num_running = 0
        self.refusal: str | None = None

    @property
    def num_left(self) -> int:
        """Requests that have not ended."""
        return len(self._requests) - self._num_sent + self.num_running

    @property
    def next_arrival(self) -> float:
        return self._arrivals[self._num_sent] if self._num_sent < len(self._requests) else 0.0

    def send(self, at_s: float, max_concurrency: int | None) -> None:
        room = len(self._requests) if max_concurrency is None else max_concurrency
        while self._num_sent < len(self._requests) and self.next_arrival <= at_s and self.num_running < room:
            request = self._requests[self._num_sent]
            try:
                self._engine.add_request(str(self._num_sent), request.prompt_token_ids, request.params)
                self.num_running += 1
            except RequestError as error:
                self._failed[self._num_sent] = True
                self.refusal = self.refusal or str(error)
                self._on_end()
            self._num_sent += 1

    def receive(self, outputs: "Sequence[RequestOutput]", at_s: float) -> None:
        for output in outputs:
            sample, index = output.outputs[0], int(output.request_id)
            self._token_times[index] += [at_s] * len(sample.token_ids)
            if output.finished:
                self.num_running -= 1
                self._failed[index] = sample.finish_reason not in ("stop", "length")
                self._on_end()

    def records(self) -> list[RequestRecord]:
        return [
            RequestRecord(
                prompt_len=len(request.prompt_token_ids),
                arrival_s=arrival,
                token_times_s=() if failed else tuple(times),
                failed=failed,
            )
            for request, arrival, times, failed in zip(
                self._requests, self._arrivals, self._token_times, self._failed, strict=True
            )
        ]


def _request(synthetic: "SyntheticRequest") -> TimedRequest:
    params = bench_engine.greedy(synthetic.output_len, output_kind=RequestOutputKind.DELTA)
    return TimedRequest(prompt_token_ids=synthetic.prompt_token_ids, params=params)
