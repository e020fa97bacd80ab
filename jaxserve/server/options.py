"""What the server may be told."""

import dataclasses

from jaxserve.exceptions import ParameterError

MAX_REQUEST_BYTES = 8 << 20  # all streams wait while one body is decoded


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where to listen, and what to let in.

    Raises:
        ParameterError: a value out of range.
    """

    served_model_name: str
    host: str = "127.0.0.1"
    port: int = 8000  # 0 takes a free one
    api_keys: tuple[str, ...] = ()  # none: everybody may ask
    max_request_bytes: int = MAX_REQUEST_BYTES
    drain_timeout_s: float = 30.0  # how long running requests may go on after a stop
    stall_timeout_s: float = 60.0  # for a body to come; and, on Linux, for a client to take a byte of ours

    def __post_init__(self) -> None:
        if not self.served_model_name:
            raise ParameterError("served_model_name", self.served_model_name, "a name")
        if not 0 <= self.port < 1 << 16:
            raise ParameterError("port", self.port, "in [0, 65535]")
        if self.max_request_bytes < 1:
            raise ParameterError("max_request_bytes", self.max_request_bytes, "at least 1")
        for name in ("drain_timeout_s", "stall_timeout_s"):
            if not 0.0 < getattr(self, name) <= 86400.0:
                raise ParameterError(name, getattr(self, name), "seconds in (0, 86400]")
        if any(not key or not key.isascii() or not key.isprintable() or " " in key for key in self.api_keys):
            raise ParameterError("api_keys", "<hidden>", "made of printable ASCII without spaces")
