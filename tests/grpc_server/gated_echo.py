"""A token core for the gRPC example's tests, in a module of its own: the engine's process imports nothing else."""

import time
from pathlib import Path

from echo_core import EchoCore, echo

from jaxserve.core_types import CoreOutput, CoreRequest, TokenLogprobs
from jaxserve.engine_messages import Facts


class TellingCore(EchoCore):
    """Gives made-up logprobs (the token itself at -0.5, the next token id at -1.5), and tells the last request."""

    _last: CoreRequest | None = None

    def add_request(self, request: CoreRequest) -> None:
        super().add_request(request)
        self._last = request

    def get_metrics(self) -> dict[str, float]:
        if self._last is None:
            return super().get_metrics()
        left_s = (self._last.deadline or 0.0) - self._last.arrival_time
        last = {"priority": self._last.priority, "left_s": left_s, "salt": float(self._last.cache_salt or "nan")}
        return {**super().get_metrics(), **last}

    def _advance(self, request: CoreRequest) -> CoreOutput:
        first = not self._positions[request.seq_id]
        output = super()._advance(request)
        if request.params.logprobs is not None:
            output.logprobs = [self._position(token) for token in output.new_token_ids]
        if first and request.params.prompt_logprobs is not None:
            output.prompt_logprobs = [None, *map(self._position, request.prompt_token_ids[1:])]
        output.num_cached_tokens = 2
        return output

    def _position(self, token: int) -> TokenLogprobs:
        return TokenLogprobs([token, token + 1], [-0.5, -1.5], 1)


def gated_echo(config: dict) -> tuple[EchoCore, Facts]:
    """The `CoreFactory`. Config: EchoCore's, and `gate`: a file whose appearance ends the loading of the model."""
    while "gate" in config and not Path(config["gate"]).exists():
        time.sleep(0.01)
    facts = echo(config)[1]
    facts.generation_config = {"top_k": 7}
    return TellingCore(config), facts
