"""From `response_format` to `SamplingParams`: the one place that knows which forms are served."""

from typing import Any

from jaxserve.server.errors import unsupported
from jaxserve.server.protocol import ResponseFormat


def constraint(response_format: ResponseFormat | None) -> dict[str, Any]:
    """The fields of `SamplingParams` that hold the text to this form.

    Raises:
        ApiError: 400, a form that is not served.
    """
    if response_format is None or response_format.type == "text":
        return {}
    raise unsupported(
        f"response_format {response_format.type!r} is not supported: leave it out, or use 'text'", "response_format"
    )
