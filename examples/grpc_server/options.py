"""What the server's command line takes, and what gRPC makes of it."""

import argparse
import os
from pathlib import Path

import grpc

from jaxserve.cli.options import ENGINE_OPTIONS

TOKEN_VARIABLE = "JAXSERVE_TOKEN"
CHANNEL_OPTIONS = [
    ("grpc.so_reuseport", 0),  # a taken port is an error, not a second server that gets half of the calls
    ("grpc.max_receive_message_length", 16 << 20),  # a prompt of a million token ids has 3 MiB
    ("grpc.max_concurrent_streams", 1024),  # of one connection; more wait in the client
    # A long prefill sends nothing for minutes. Clients may ping meanwhile, with a call open or not, as often as every
    # 10 s, and one that pings oftener is not cut off.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    # We ping as well: a client that vanished without a word loses its calls, and they their pages, after a minute.
    ("grpc.keepalive_time_ms", 40_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),  # no limit
]


def parser() -> argparse.ArgumentParser:
    """The server's options, and those of the engine, which all commands of jaxserve share."""
    parser = argparse.ArgumentParser(
        description="Serve a language model over gRPC. Binds loopback; set TLS and a token before you open it wider.",
        allow_abbrev=False,
    )
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="address to bind [default: 127.0.0.1]")
    server.add_argument("--port", type=int, default=50051, help="0 takes a free one [default: 50051]")
    server.add_argument("--served-model-name", help="the model's name in answers [default: --model as given]")
    server.add_argument("--tls-cert", metavar="FILE", help="PEM certificate chain of the server; needs --tls-key")
    server.add_argument("--tls-key", metavar="FILE", help="PEM private key, not encrypted")
    server.add_argument("--tls-client-ca", metavar="FILE", help="PEM CA: serve only clients with its certificates")
    server.add_argument(
        "--token",
        default=os.environ.get(TOKEN_VARIABLE),
        help=f"secret that calls must bring as `authorization: Bearer TOKEN` [default: ${TOKEN_VARIABLE}, else none]",
    )
    server.add_argument(
        "--grace-s", type=float, default=20.0, help="how long running requests may go on after SIGTERM [default: 20]"
    )
    engine = parser.add_argument_group("engine")
    for name, option in ENGINE_OPTIONS.items():
        kind = {"action": argparse.BooleanOptionalAction} if option.type is bool else {"type": option.type}
        unset = f" [default: {option.unset}]" if option.unset else ""
        text = (option.help + unset).replace("%", "%%")
        engine.add_argument("--" + name.replace("_", "-"), required=name == "model", help=text, **kind)
    return parser


def engine_options(options: argparse.Namespace) -> dict[str, object]:
    """The arguments of `AsyncLLM` that were given."""
    return {name: value for name, value in vars(options).items() if name in ENGINE_OPTIONS and value is not None}


def check_token(token: str | None) -> str | None:
    """Raises ValueError for a token that no metadata can carry, an empty one included: it would protect nothing."""
    if token is not None and not (token and token.isascii() and token.isprintable() and token == token.strip()):
        raise ValueError("the token must be of printable ASCII, not empty, without spaces at its ends")
    return token


def server_credentials(cert: str | None, key: str | None, client_ca: str | None) -> grpc.ServerCredentials | None:
    """None without TLS.

    Raises:
        ValueError: half of a pair.
        OSError: a file cannot be read.
    """
    if (cert is None) != (key is None) or (client_ca is not None and cert is None):
        raise ValueError("TLS needs both --tls-cert and --tls-key; --tls-client-ca needs them too")
    if cert is None or key is None:
        return None
    ca = None if client_ca is None else Path(client_ca).read_bytes()
    pair = (Path(key).read_bytes(), Path(cert).read_bytes())
    return grpc.ssl_server_credentials([pair], root_certificates=ca, require_client_auth=ca is not None)
