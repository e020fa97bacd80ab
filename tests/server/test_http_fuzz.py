"""Requests made from the server's own /openapi.json, valid and not: no status that it does not tell, and no 5xx but
503. (The core refuses the prompt "full" with 503; nothing else may.)"""

import hypothesis
import pytest
import schemathesis
from echo_core import echo
from http_server import running
from hypothesis import HealthCheck, Phase
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from jaxserve import AsyncLLM
from jaxserve.server.options import ServerOptions

CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance, negative_data_rejection]


@pytest.fixture(scope="module")
def server():
    """A short context, since a chat without a limit fills it."""
    options = ServerOptions(served_model_name="echo", port=0)
    with running(options, load=lambda: AsyncLLM.over(echo, {"max_model_len": 64})) as it:
        yield it


def fuzz(server, num_examples: int) -> set[int]:
    """The statuses that came."""
    schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{server.port}/openapi.json")
    statuses: set[int] = set()
    for result in schema.get_all_operations():
        operation = result.ok()
        run(operation, GenerationMode.POSITIVE, num_examples, statuses)
        if operation.method == "post":
            run(operation, GenerationMode.NEGATIVE, num_examples, statuses)
    return statuses


def run(operation, mode, num_examples: int, statuses: set[int]) -> None:
    @hypothesis.given(operation.as_strategy(generation_mode=mode))
    @hypothesis.settings(
        max_examples=num_examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def check(case) -> None:
        response = case.call(timeout=30)
        statuses.add(response.status_code)
        assert response.status_code < 500 or response.status_code == 503
        case.validate_response(response, checks=CHECKS)

    check()


def test_hostile_requests_harm_nobody(server):
    statuses = fuzz(server, 25)
    assert {200, 400} <= statuses
    server.settled(running=0)
    answer = server.ask("POST", "/v1/completions", {"prompt": "abc", "max_tokens": 4})[1]
    assert answer["choices"][0]["text"] == "abca"
    assert server.ask("GET", "/health")[0] == 200


@pytest.mark.full
def test_many_hostile_requests_harm_nobody(server):
    assert {200, 400} <= fuzz(server, 500)
    server.settled(running=0)
    assert server.ask("GET", "/health")[0] == 200
