"""A real server on a loopback port, in a thread, over a token core without a model."""

import pytest
from http_server import Running, running

from jaxserve.server.options import ServerOptions

MODEL = "echo"


@pytest.fixture(scope="session")
def server() -> "Running":
    with running(ServerOptions(served_model_name=MODEL, port=0)) as it:
        yield it
