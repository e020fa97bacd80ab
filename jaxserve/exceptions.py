"""Every error that jaxserve raises on purpose.

`ValueError` and its children are the caller's; `NotImplementedError` means unsupported here; `RequestError` ends one
request while the engine lives on; `EngineDeadError` ends everything.
"""


def how_to_install(extra: str) -> str:
    """The command that brings an extra of jaxserve, for a package and for a checkout."""
    return f'pip install "jaxserve[{extra}]", or in a checkout: .venv/bin/pip install -e ".[{extra}]"'


class JaxserveError(Exception):
    """Root of the errors that are not a plain ValueError or NotImplementedError."""


class ParameterError(JaxserveError, ValueError):
    """One parameter is out of range. `parameter` is its name, `value` what came."""

    def __init__(self, parameter: str, value: object, expected: str):
        shown = repr(value)
        super().__init__(f"{parameter} must be {expected}, got {shown if len(shown) <= 200 else shown[:200] + '...'}")
        self.parameter, self.value, self._expected = parameter, value, expected

    def __reduce__(self):  # an exception is pickled by its message alone, and this one is made of three parts
        return type(self), (self.parameter, self.value, self._expected)


class RequestError(JaxserveError, ValueError):
    """One bad request; others are unharmed."""


class QueueFullError(RequestError):
    """The waiting queue is at its limit; try again later."""


class EngineDeadError(JaxserveError, RuntimeError):
    """The engine stopped and cannot go on; every later call fails at once."""


class WeightsError(JaxserveError, ValueError):
    """A checkpoint that is incomplete, misshapen or damaged; the message names the tensor or the file."""


# What a hostile row of a batch may run into; a defect of ours among these costs the row, not the job.
COSTS_ITS_ROW = (
    ValueError,
    TypeError,
    AttributeError,
    KeyError,
    OverflowError,
    RecursionError,
    NotImplementedError,
    JaxserveError,
)


def why_refused(error: Exception) -> str:
    """The words for the row: errors that were not raised for a caller have their type named."""
    known = isinstance(error, ValueError | NotImplementedError | JaxserveError)
    return str(error) if known else f"{type(error).__name__}: {error}"  # a bare KeyError says only the key
