"""A token core without a model, for tests of what stands around one: it repeats the prompt, one token a step.

Runs in the engine's child process, so it imports little. A token is a character of ASCII. Some prompts plant faults.
"""

import time

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxserve.core_types import CoreOutput, CoreRequest, TokenLogprobs
from jaxserve.engine_messages import Facts, TokenizerFacts
from jaxserve.exceptions import QueueFullError, RequestError
from jaxserve.tokenizer import Tokenizer

VOCAB_SIZE = 128
MAX_MODEL_LEN = 4096


def ascii_tokenizer() -> Tokenizer:
    vocab = {chr(i): i for i in range(VOCAB_SIZE)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend, chat_template="{{ messages[0].content }}")


class EchoCore:
    """Config: `step_s`, the least time that a step takes."""

    def __init__(self, config: dict):
        self._step_s = config.get("step_s", 0.0)
        self._running: dict[int, CoreRequest] = {}
        self._positions: dict[int, int] = {}
        self._counts = {"steps": 0, "finished": 0, "aborted": 0, "stopped": 0}

    def add_request(self, request: CoreRequest) -> None:
        prompt = "".join(map(chr, request.prompt_token_ids))
        if prompt == "refuse" or (prompt == "refuse the second" and request.leader is not None):
            raise RequestError("refused, as planted")
        if prompt == "full":
            raise QueueFullError("the queue is full, as planted")
        self._running[request.seq_id] = request
        self._positions[request.seq_id] = 0

    def finish(self, seq_ids: list[int], reason: str, stop_reason: str | None = None) -> list[CoreOutput]:
        for seq_id in seq_ids:
            if self._running.pop(seq_id, None) is not None:
                self._counts["aborted" if reason == "abort" else "stopped"] += 1
        return []

    def step(self) -> list[CoreOutput]:
        time.sleep(self._step_s)
        self._counts["steps"] += 1
        outputs = [self._advance(request) for request in self._running.values()]
        for output in outputs:
            if output.finish_reason is not None:
                del self._running[output.seq_id]
                self._counts["finished"] += 1
        return outputs

    def _advance(self, request: CoreRequest) -> CoreOutput:
        prompt, position = request.prompt_token_ids, self._positions[request.seq_id]
        if prompt == list(b"crash"):
            raise RuntimeError("planted fault")
        self._positions[request.seq_id] += 1
        last = position + 1 == request.params.max_tokens
        token = prompt[position % len(prompt)]
        return CoreOutput(
            seq_id=request.seq_id,
            new_token_ids=[token],
            finish_reason="length" if last else None,
            logprobs=None if request.params.logprobs is None else [logprobs_of(token, request.params.logprobs)],
        )

    def has_unfinished(self) -> bool:
        return bool(self._running)

    def reset_prefix_cache(self) -> bool:
        return not self._running

    def get_metrics(self) -> dict[str, float]:
        return {**self._counts, "running": len(self._running)}

    def close(self) -> None:
        pass


def logprobs_of(token: int, num_top: int) -> TokenLogprobs:
    """The token is the likeliest, the next ids follow; the k-th has the log probability -k / 2."""
    top = [(token + i) % VOCAB_SIZE for i in range(num_top)]
    return TokenLogprobs([token, *top], [-0.5, *(-0.5 * (i + 1) for i in range(num_top))], 1)


def echo(config: dict) -> tuple[EchoCore, Facts]:
    """The `CoreFactory`. `fail`: it cannot start; `tokenizer` False: there is none; `max_model_len`."""
    if config.get("fail"):
        raise ValueError("no such weights, as planted")
    return EchoCore(config), Facts(
        tokenizer=TokenizerFacts.of(ascii_tokenizer()) if config.get("tokenizer", True) else None,
        vocab_size=VOCAB_SIZE,
        max_model_len=config.get("max_model_len", MAX_MODEL_LEN),
        max_logprobs=20,
        generation_config={},
        seed=0,
    )
