"""What a request asks of the sampler, as rows of numpy arrays for the device's slot state."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxserve.core_types import CoreRequest
from jaxserve.layers.limits import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, MAX_BIAS
from jaxserve.layers.sampler import EditState
from jaxserve.scheduler.request import Request

RANDOM, EDITS, LOGPROBS = 1, 2, 4  # bits of a slot's feature flags


def feature_flags(request: Request) -> int:
    """Which parts of the sampler this request needs."""
    core = request.sampling
    assert isinstance(core, CoreRequest)
    p = core.params
    penalties = p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0
    edits = penalties or p.logit_bias or p.allowed_token_ids or core.bad_words_token_ids or p.min_tokens
    edits = edits or p.structured_outputs is not None
    return RANDOM * (not p.greedy) | EDITS * bool(edits) | LOGPROBS * (p.logprobs is not None)


def fill_slot_row(ints: np.ndarray, floats: np.ndarray, request: Request) -> None:
    """One row of `start_slots`."""
    core = request.sampling
    assert isinstance(core, CoreRequest)
    p = core.params
    seed = (p.seed or 0) & 0xFFFFFFFFFFFFFFFF
    words = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32).view(np.int32)
    stop_ids = [*core.eos_token_ids, *(p.stop_token_ids or ())]
    ints[0], ints[1], ints[2:4] = request.slot, p.top_k, words
    ints[4] = len(core.prompt_token_ids) + p.min_tokens
    ints[5 : 5 + len(stop_ids)] = stop_ids
    floats[:] = (
        p.temperature, p.top_p, p.min_p, p.presence_penalty, p.frequency_penalty, p.repetition_penalty
    )  # fmt: skip


def edit_row(request: Request, vocab_size: int) -> EditState:
    """One slot's `EditState` row; counts start from the output so far, which a pre-empted request has."""
    core = request.sampling
    assert isinstance(core, CoreRequest)
    p, output = core.params, request.output_token_ids
    bias = list((p.logit_bias or {}).items())
    bias_ids, bias_values = np.full(MAX_BIAS, vocab_size, np.int32), np.zeros(MAX_BIAS, np.float32)
    bias_ids[: len(bias)] = [token for token, _ in bias]
    bias_values[: len(bias)] = [value for _, value in bias]
    words = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_LEN), -1, np.int32)
    for i, word in enumerate(core.bad_words_token_ids):
        words[i, -len(word) :] = word
    history = np.full(MAX_BAD_WORD_LEN - 1, -1, np.int32)
    tail = output[-len(history) :]
    history[len(history) - len(tail) :] = tail
    prompt_mask = np.zeros(vocab_size, bool)
    prompt_mask[request.prompt_token_ids] = True
    row: dict[str, Any] = {  # numpy arrays: they go straight into the compiled call
        "bias_ids": bias_ids,
        "bias": bias_values,
        "allowed": allowed_mask(p.allowed_token_ids, vocab_size),
        "bad_words": words,
        "history": history,
        "prompt_mask": prompt_mask,
        "counts": np.bincount(np.array(output, np.int64), minlength=vocab_size).astype(np.int32),
    }
    return EditState(**row)


def allowed_mask(token_ids: Sequence[int] | None, vocab_size: int) -> np.ndarray:
    """u32 [ceil(V / 32)], bit `t % 32` of word `t // 32` set when token t may be sampled."""
    allowed = np.zeros(-(-vocab_size // 32) * 32, bool)
    allowed[slice(None) if token_ids is None else list(token_ids)] = True
    return np.packbits(allowed, bitorder="little").view(np.uint32)
