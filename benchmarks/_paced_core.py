"""A core without a model for the load of front ends: a step at fixed times, and the time of each for all to read."""

import mmap
import time

import numpy as np
import tokenizers
from tokenizers import decoders, models

from jaxserve.core_types import CoreOutput, CoreRequest
from jaxserve.engine_messages import Facts, TokenizerFacts
from jaxserve.tokenizer import Tokenizer

NUM_STAMPS = 1 << 16  # steps until their numbers begin again


class PacedCore:
    """Config: `step_s`, and `stamps`, the path of the file for the times of steps."""

    def __init__(self, config: dict):
        self._step_s, self._step = config["step_s"], 0
        self._stamps = map_stamps(config["stamps"])
        self._left: dict[int, int] = {}  # tokens to go, by sequence
        self._next = time.monotonic()

    def add_request(self, request: CoreRequest) -> None:
        assert request.params.max_tokens is not None
        self._left[request.seq_id] = request.params.max_tokens

    def finish(self, seq_ids: list[int], reason: str, stop_reason: str | None = None) -> list[CoreOutput]:
        for seq_id in seq_ids:
            self._left.pop(seq_id, None)
        return []

    def step(self) -> list[CoreOutput]:
        self._next = max(self._next + self._step_s, time.monotonic())
        time.sleep(max(0.0, self._next - time.monotonic()))
        self._step = (self._step + 1) % NUM_STAMPS
        outputs = []
        for seq_id, left in list(self._left.items()):
            last = left == 1
            outputs.append(
                CoreOutput(seq_id=seq_id, new_token_ids=[self._step], finish_reason="length" if last else None)
            )
            if last:
                del self._left[seq_id]
            else:
                self._left[seq_id] = left - 1
        self._stamps[self._step] = time.monotonic()
        return outputs

    def has_unfinished(self) -> bool:
        return bool(self._left)

    def get_metrics(self) -> dict[str, float]:
        return {"running": len(self._left)}

    def close(self) -> None:
        pass


def paced(config: dict) -> tuple[PacedCore, Facts]:
    """The `CoreFactory`. A token's text is the number of its step in four hexadecimal digits."""
    vocab = {f"{i:04x}": i for i in range(NUM_STAMPS)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.decoder = decoders.ByteLevel()
    facts = Facts(
        tokenizer=TokenizerFacts.of(Tokenizer(backend)),
        vocab_size=NUM_STAMPS,
        max_model_len=4096,
        max_logprobs=0,
        generation_config={},
        seed=0,
    )
    return PacedCore(config), facts


def map_stamps(path: str) -> np.ndarray:
    with open(path, "r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 8 * NUM_STAMPS), np.float64)
