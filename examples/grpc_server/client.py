"""Streams an answer from the server: `python client.py "The capital of France is" --max-tokens 32`."""

import argparse
import sys

try:
    import generation_pb2 as pb
    import generation_pb2_grpc as rpc
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc
except ModuleNotFoundError as error:
    sys.exit(
        f"error: {error.name} is not installed; at the root of the checkout: "
        f'.venv/bin/pip install -e ".[grpc]", then run this with .venv/bin/python'
    )

SERVICE = pb.DESCRIPTOR.services_by_name["Generation"].full_name
CONNECT_S = 10.0
LOAD_S = 600.0
MAX_TOKENS = 2**32 - 1  # of a uint32


def wait_until_ready(channel: grpc.Channel, timeout_s: float) -> None:
    """Until the server has loaded its model.

    Raises:
        grpc.RpcError: it has not after `timeout_s`, or it ended.
        ConnectionError: its engine died.
    """
    status = health_pb2.HealthCheckResponse
    health = health_pb2_grpc.HealthStub(channel)
    watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=timeout_s)
    for response in watch:
        if response.status == status.SERVING:
            break
        if health.Check(health_pb2.HealthCheckRequest(service=""), timeout=CONNECT_S).status != status.SERVING:
            raise ConnectionError("the server's engine died; its log says why")
        print(f"the server loads its model; waiting for up to {timeout_s:g} s", file=sys.stderr)
    watch.cancel()


def stream(channel: grpc.Channel, request: pb.GenerateRequest, timeout_s: float | None = None) -> pb.Completion | None:
    """Prints the first sample's text as it comes; returns its completion."""
    completion = None
    for response in rpc.GenerationStub(channel).Generate(request, timeout=timeout_s):
        if response.HasField("delta") and response.delta.index == 0:
            print(response.delta.text, end="", flush=True)
        elif response.HasField("completion") and response.completion.index == 0:
            completion = response.completion
    return completion


def ask(address: str, request: pb.GenerateRequest, timeout_s: float | None) -> pb.Completion | None:
    """`stream` on a channel to the server at `address`, once that is ready."""
    with grpc.insecure_channel(address) as channel:
        grpc.channel_ready_future(channel).result(timeout=CONNECT_S)
        wait_until_ready(channel, LOAD_S)
        return stream(channel, request, timeout_s)


def main() -> None:
    parser = argparse.ArgumentParser(description="client of the jaxserve gRPC example")
    parser.add_argument("prompt")
    parser.add_argument("--address", default="127.0.0.1:50051")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=None, help="0 always takes the likeliest token; unset: 1")
    parser.add_argument("--timeout-s", type=float, default=None, help="the request's deadline")
    options = parser.parse_args()
    if not 1 <= options.max_tokens <= MAX_TOKENS:
        sys.exit(f"error: --max-tokens must be in [1, {MAX_TOKENS}], got {options.max_tokens}")
    params = pb.SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature)
    request = pb.GenerateRequest(text=options.prompt, sampling_params=params)
    try:
        completion = ask(options.address, request, options.timeout_s)
    except grpc.FutureTimeoutError:
        sys.exit(f"error: no server answers at {options.address}")
    except grpc.RpcError as error:
        sys.exit(f"error: {error.code().name}: {error.details()}")
    except ConnectionError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    if completion is not None:
        print(f"\n[{completion.finish_reason}, {len(completion.token_ids)} tokens]")


if __name__ == "__main__":
    main()
