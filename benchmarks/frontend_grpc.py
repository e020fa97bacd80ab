"""What does gRPC add to a token's way, over the engine in the server's own process?

A core without a model emits one token a sequence at every tick of a fixed grid, so a token's latency is its arrival
less its tick. The same streams run twice: read in-process from `AsyncLLM`, and by grpc.aio clients of the example server.
Engine, server and clients are processes of their own. Both sides read the machine's one monotonic clock.

    python -m benchmarks.frontend_grpc --streams 32 --step-s 0.02
    python -m benchmarks.frontend_grpc --streams 256 --step-s 0.05

For another benchmark that wants gRPC beside its own front end: `serving(step_s)` is a context with a running server's
address, and `stream(channel, prompt, max_tokens)` reads one answer as [(time.monotonic() of arrival, tokens)].
"""

import argparse
import asyncio
import contextlib
import importlib
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import grpc
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from benchmarks._report import Row, report
from jaxserve import AsyncLLM, RequestOutputKind, SamplingParams
from jaxserve.core_types import CoreOutput, CoreRequest
from jaxserve.engine_messages import Facts, TokenizerFacts
from jaxserve.tokenizer import Tokenizer

EXAMPLE = Path(__file__).parents[1] / "examples" / "grpc_server"
NUM_CHANNELS = 8  # connections that the streams share

type Arrivals = list[tuple[float, int]]  # time.monotonic(), tokens


class GridCore:
    """Emits "a" for every running sequence at each multiple of `step_s` on the monotonic clock."""

    def __init__(self, step_s: float):
        self._step_s = step_s
        self._left: dict[int, int] = {}  # tokens to come

    def add_request(self, request: CoreRequest) -> None:
        self._left[request.seq_id] = request.params.max_tokens or 1

    def finish(self, seq_ids: list[int], reason: str, stop_reason: str | None = None) -> list[CoreOutput]:
        for seq_id in seq_ids:
            self._left.pop(seq_id, None)
        return []

    def step(self) -> list[CoreOutput]:
        now = time.monotonic()
        time.sleep(self._step_s - now % self._step_s)
        outputs = []
        for seq_id in self._left:
            self._left[seq_id] -= 1
            reason = None if self._left[seq_id] else "length"
            outputs.append(CoreOutput(seq_id=seq_id, new_token_ids=[97], finish_reason=reason))
        self._left = {seq_id: left for seq_id, left in self._left.items() if left}
        return outputs

    def has_unfinished(self) -> bool:
        return bool(self._left)

    def get_metrics(self) -> dict[str, float]:
        return {"running": len(self._left)}

    def close(self) -> None:
        pass


def grid_core(step_s: float) -> tuple[GridCore, Facts]:
    """The `CoreFactory`."""
    backend = tokenizers.Tokenizer(models.WordLevel({chr(i): i for i in range(128)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return GridCore(step_s), Facts(
        tokenizer=TokenizerFacts.of(Tokenizer(backend)),
        vocab_size=128,
        max_model_len=1 << 20,
        max_logprobs=0,
        generation_config={},
        seed=0,
    )


def example(name: str):
    """A module of the example, which is a folder of scripts."""
    if str(EXAMPLE) not in sys.path:
        sys.path.insert(0, str(EXAMPLE))
    return importlib.import_module(name)


async def stream(channel: grpc.aio.Channel, prompt: str, max_tokens: int) -> Arrivals:
    """One answer through the server that `channel` leads to."""
    pb, rpc = example("generation_pb2"), example("generation_pb2_grpc")
    request = pb.GenerateRequest(text=prompt, sampling_params=pb.SamplingParams(max_tokens=max_tokens))
    arrivals = []
    async for response in rpc.GenerationStub(channel).Generate(request):
        if response.HasField("delta"):
            arrivals.append((time.monotonic(), len(response.delta.token_ids)))
    return arrivals


async def stream_in_process(engine: AsyncLLM, prompt: str, max_tokens: int, request_id: str) -> Arrivals:
    params = SamplingParams(max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA)
    arrivals = []
    async for output in engine.generate(prompt, params, request_id):
        arrivals.append((time.monotonic(), len(output.outputs[0].token_ids)))
    return arrivals


@contextlib.contextmanager
def serving(step_s: float) -> Iterator[str]:
    """The address of a server in a process of its own, over a `GridCore`."""
    command = [sys.executable, "-m", "benchmarks.frontend_grpc", "--serve", "--step-s", str(step_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.send_signal(signal.SIGTERM)


async def serve(step_s: float) -> None:
    server = example("server").Server("127.0.0.1:0", model_name="grid")
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.interrupt)
    print(f"listening on 127.0.0.1:{server.port}", flush=True)
    await server.run(lambda: AsyncLLM.over(grid_core, step_s))


async def measure_grpc(address: str, streams: int, max_tokens: int) -> list[Arrivals]:
    options = [("grpc.use_local_subchannel_pool", 1)]  # else all channels share one connection
    async with contextlib.AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(address, options))
            for _ in range(min(streams, NUM_CHANNELS))
        ]
        health, stub = example("client").health_pb2, example("client").health_pb2_grpc.HealthStub(channels[0])
        service = health.HealthCheckRequest(service=example("client").SERVICE)
        async for response in stub.Watch(service, wait_for_ready=True):
            if response.status == health.HealthCheckResponse.SERVING:
                break
        return await together(lambda i: stream(channels[i % len(channels)], "abc", max_tokens), streams)


async def measure_in_process(step_s: float, streams: int, max_tokens: int) -> list[Arrivals]:
    engine = await asyncio.to_thread(AsyncLLM.over, grid_core, step_s)
    try:
        return await together(lambda i: stream_in_process(engine, "abc", max_tokens, str(i)), streams)
    finally:
        engine.shutdown()


async def together(start: Callable[[int], Awaitable[Arrivals]], streams: int) -> list[Arrivals]:
    return await asyncio.gather(*(start(i) for i in range(streams)))


def latencies_ms(runs: list[Arrivals], step_s: float, max_tokens: int) -> list[float]:
    """Of each token, from its tick to its arrival. A stream's quickest token is taken to need less than a step.

    Raises:
        AssertionError: a stream has lost or doubled a token.
    """
    found = []
    for arrivals in runs:
        times = [at for at, count in arrivals for _ in range(count)]
        assert len(times) == max_tokens, f"expected {max_tokens} tokens, got {len(times)}"
        late = [at - i * step_s for i, at in enumerate(times)]
        first_tick = min(late) // step_s * step_s
        found += [(at - first_tick) * 1e3 for at in late]
    return found


def p(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description="latency that the gRPC example adds to a token")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--max-tokens", type=int, default=500)
    parser.add_argument("--serve", action="store_true", help="be the server")
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.step_s))
        return
    size = options.step_s, options.max_tokens
    inside = latencies_ms(asyncio.run(measure_in_process(options.step_s, options.streams, options.max_tokens)), *size)
    with serving(options.step_s) as address:
        outside = latencies_ms(asyncio.run(measure_grpc(address, options.streams, options.max_tokens)), *size)
    for name, values in (("in-process", inside), ("gRPC", outside)):
        print(f"{name}: p50 {p(values, 50):.2f} ms, p99 {p(values, 99):.2f} ms, most {max(values):.2f} ms")
    row = Row(
        name=f"frontend_grpc/{options.streams}_streams/added_p99",
        value=p(outside, 99) - p(inside, 99),
        unit="ms",
        target=5.0 if options.streams <= 32 else 40.0,
        lower_is_better=True,
    )
    report([row])


if __name__ == "__main__":
    main()
