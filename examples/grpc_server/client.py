"""Streams an answer from the server: `python client.py "The capital of France is" --max-tokens 32`."""

import argparse
import os
import sys
from pathlib import Path

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
TOKEN_VARIABLE = "JAXSERVE_TOKEN"
CONNECT_S = 10.0
LOAD_S = 600.0
MAX_TOKENS = 2**32 - 1  # of a uint32
CHANNEL_OPTIONS = [
    ("grpc.keepalive_time_ms", 20_000),  # a long prefill sends nothing; a dead connection shall not look like one
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),  # no limit
]


def connect(address: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.Channel:
    """A channel to the server, in plain text without credentials."""
    if credentials is None:
        return grpc.insecure_channel(address, CHANNEL_OPTIONS)
    return grpc.secure_channel(address, credentials, CHANNEL_OPTIONS)


def channel_credentials(ca: str | None, cert: str | None, key: str | None) -> grpc.ChannelCredentials | None:
    """From PEM files; None without `ca`, the certificate authority of the server.

    Raises:
        ValueError: a certificate of the client without its key, or without `ca`.
        OSError: a file cannot be read.
    """
    if (cert is None) != (key is None) or (cert is not None and ca is None):
        raise ValueError("a client's certificate needs --tls-cert, --tls-key and --tls-ca")
    if ca is None:
        return None
    read = [None if name is None else Path(name).read_bytes() for name in (ca, key, cert)]
    return grpc.ssl_channel_credentials(*read)


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
            raise ConnectionError("the server is stopping, or its engine died; its log says which")
        print(f"the server loads its model; waiting for up to {timeout_s:g} s", file=sys.stderr)
    watch.cancel()


def stream(
    channel: grpc.Channel, request: pb.GenerateRequest, *, timeout_s: float | None = None, token: str | None = None
) -> pb.Completion | None:
    """Prints the first sample's text as it comes; returns its completion. Ctrl-C aborts the request."""
    metadata = None if token is None else [("authorization", f"Bearer {token}")]
    call = rpc.GenerationStub(channel).Generate(request, timeout=timeout_s, metadata=metadata)
    completion = None
    try:
        for response in call:
            if response.HasField("delta") and response.delta.index == 0:
                print(response.delta.text, end="", flush=True)
            elif response.HasField("completion") and response.completion.index == 0:
                completion = response.completion
    finally:
        call.cancel()  # no-op at the stream's end
    return completion


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="client of the jaxserve gRPC example", allow_abbrev=False)
    parser.add_argument("prompt")
    parser.add_argument("--address", default="127.0.0.1:50051", help="[default: 127.0.0.1:50051]")
    parser.add_argument("--max-tokens", type=int, default=64, help="most tokens of the answer [default: 64]")
    parser.add_argument("--temperature", type=float, help="0 always takes the likeliest token [default: the model's]")
    parser.add_argument("--timeout-s", type=float, help="the request's deadline [default: none]")
    parser.add_argument("--tls-ca", metavar="FILE", help="PEM CA of the server; without it: plain text")
    parser.add_argument("--tls-cert", metavar="FILE", help="PEM certificate of this client, if the server asks for one")
    parser.add_argument("--tls-key", metavar="FILE", help="its PEM private key")
    parser.add_argument(
        "--token", default=os.environ.get(TOKEN_VARIABLE), help=f"the server's [default: ${TOKEN_VARIABLE}, else none]"
    )
    options = parser.parse_args()
    if not 1 <= options.max_tokens <= MAX_TOKENS:
        raise ValueError(f"--max-tokens must be in [1, {MAX_TOKENS}], got {options.max_tokens}")
    return options


def ask(options: argparse.Namespace) -> pb.Completion | None:
    """`stream` on a channel to the server, once that is ready."""
    params = pb.SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature)
    request = pb.GenerateRequest(text=options.prompt, sampling_params=params)
    credentials = channel_credentials(options.tls_ca, options.tls_cert, options.tls_key)
    with connect(options.address, credentials) as channel:
        grpc.channel_ready_future(channel).result(timeout=CONNECT_S)
        wait_until_ready(channel, LOAD_S)
        return stream(channel, request, timeout_s=options.timeout_s, token=options.token)


def main() -> None:
    options = None
    try:
        options = arguments()
        completion = ask(options)
    except grpc.FutureTimeoutError:
        assert options is not None
        hint = "" if options.tls_ca else ", or it wants TLS (--tls-ca)"
        sys.exit(f"error: no server answers at {options.address}{hint}")
    except grpc.RpcError as error:
        sys.exit(f"error: {error.code().name}: {error.details()}")
    except (ConnectionError, ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    if completion is not None:
        print(f"\n[{completion.finish_reason}, {completion.num_completion_tokens} tokens]")


if __name__ == "__main__":
    main()
