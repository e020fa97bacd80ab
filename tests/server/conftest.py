import pytest
from http_server import Running, running

from jaxserve.server.options import ServerOptions


@pytest.fixture(scope="session")
def server() -> "Running":
    """A server over a core without a model, for the tests that leave it as it was."""
    with running(ServerOptions(served_model_name="echo", port=0)) as it:
        yield it
