"""Policies beside dense attention, in one table."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxserve import weights
from jaxserve.evaluation.needles import make_needle
from jaxserve.evaluation.watch import watch
from jaxserve.layers.sparse import SparseAttention
from jaxserve.tokenizer import Tokenizer

MANY_KEYS = 4
ENOUGH = 0.95  # of dense attention's answers must be right for a task to tell anything


class Told(NamedTuple):
    """A text of which the tokens from `num_prompt` on go through the policies, and the last `num_answer` count."""

    token_ids: list[int]
    num_prompt: int
    num_answer: int

    @property
    def answer(self) -> list[int]:
        return self.token_ids[-self.num_answer :]


def compare(
    model: str,
    policies: Sequence[SparseAttention | None],
    text: str | None,
    *,
    num_tokens: int,
    num_needles: int,
    page_size: int,
) -> list[dict[str, Any]]:
    """One row for dense attention, then one a policy.

    Needles: the share of answers that greedy decoding gives exactly; their questions go through the policies too. A
    task of which dense attention solves less than 95 % is left out. Text: perplexity of its last quarter, the mean
    divergence from dense attention, recall and density, as `watch` has them.

    Raises:
        ValueError: a text that is too short, or policies that do not fit the model.
    """
    loaded = weights.load(model, dtype=jnp.bfloat16, progress=False)
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        raise ValueError(f"model must come with a tokenizer, got {model}")
    tasks = {
        name: [_needle(tokenizer, num_tokens, num_keys, seed) for seed in range(num_needles)]
        for name, num_keys in (("needle", 1), (f"needle of {MANY_KEYS}", MANY_KEYS))
        if num_needles
    }
    known = None if text is None else _told_again(tokenizer, text, num_tokens)
    rows, truth = [], None
    for sparse in [None, *policies]:
        row: dict[str, Any] = {"policy": _described(sparse)}
        for name, needles in list(tasks.items()):
            solved = [
                watch(loaded, sparse, needle.token_ids, needle.num_prompt, page_size=page_size).says(needle.answer)
                for needle in needles
            ]
            right = np.mean(solved)
            if sparse is None and right < ENOUGH:
                tasks.pop(name)
                continue
            row[name] = float(right)
        if known is not None:
            found = watch(loaded, sparse, known.token_ids, known.num_prompt, page_size=page_size)
            truth = truth or found
            nll = found.nll(known.token_ids[known.num_prompt :])
            row |= {"perplexity": float(np.exp(nll)), "kl": found.kl_from(truth)}
            row |= {"recall": found.recall, "density": found.density}
        rows.append(row)
    return rows


def _described(sparse: SparseAttention | None) -> str:
    """The policies' names, and what differs from their defaults."""
    if sparse is None:
        return "dense"
    said = []
    for phase in ("decode", "prefill"):
        policy = getattr(sparse, phase)
        if policy is not None:
            own = [field.name for field in dataclasses.fields(policy) if getattr(policy, field.name) != field.default]
            options = ", ".join(f"{name}={getattr(policy, name)}" for name in own)
            said.append(f"{phase} {policy.name}({options})")
    return ", ".join(said)


def _needle(tokenizer: Tokenizer, num_tokens: int, num_keys: int, seed: int) -> Told:
    """As many sentences as fit."""
    low, high = 0, num_tokens
    while low + 1 < high:
        middle = (low + high) // 2
        fits = len(_encoded(tokenizer, middle, num_keys, seed).token_ids) <= num_tokens
        low, high = (middle, high) if fits else (low, middle)
    return _encoded(tokenizer, low, num_keys, seed)


def _encoded(tokenizer: Tokenizer, num_sentences: int, num_keys: int, seed: int) -> Told:
    parts = [tokenizer.encode(part, add_special_tokens=False) for part in make_needle(num_sentences, num_keys, seed)]
    return Told([*parts[0], *parts[1], *parts[2]], len(parts[0]), len(parts[2]))


def _told_again(tokenizer: Tokenizer, text: str, num_tokens: int) -> Told:
    token_ids = tokenizer.encode(text)[:num_tokens]
    if len(token_ids) < num_tokens:
        raise ValueError(f"text must have at least {num_tokens} tokens, got {len(token_ids)}; lower --num-tokens")
    return Told(token_ids, num_tokens - num_tokens // 4, num_tokens // 4)
