"""The example's own `main` over a fake token core: `python echo_server.py '{"step_s": 0.001}' --model echo --port 0`.

The JSON is EchoCore's config, and `gate`: a file whose appearance ends the loading of the model.
"""

import asyncio
import json
import logging
import sys
import time
from pathlib import Path

from echo_core import EchoCore, echo

from jaxserve import AsyncLLM, EngineDeadError
from jaxserve.core_types import CoreOutput, CoreRequest, TokenLogprobs
from jaxserve.engine_messages import Facts


class LogprobsCore(EchoCore):
    """Gives made-up logprobs: the token itself at -0.5, the next token id at -1.5."""

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
    while "gate" in config and not Path(config["gate"]).exists():
        time.sleep(0.01)
    core = LogprobsCore(config)
    facts = echo(config)[1]
    facts.generation_config = {"top_k": 7}
    return core, facts


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "grpc_server"))
    import server

    config = json.loads(sys.argv.pop(1))
    server.AsyncLLM = lambda **options: AsyncLLM.over(gated_echo, config)
    logging.basicConfig(level=logging.INFO)
    try:
        asyncio.run(server.main(server.parser().parse_args()))
    except EngineDeadError as error:
        sys.exit(f"error: {error}")
