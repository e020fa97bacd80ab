"""The golden models of tests/golden as jaxserve sees them, and a driver that feeds them through the paged forward."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.layers.decoder import forward
from jaxserve.layers.kv_cache import AttentionBatch, KVCache, StepBatch, init_kv_cache
from jaxserve.models import Model, get_model

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = tuple(sorted(path.stem for path in GOLDEN.glob("*.npz")))
BOUND = 1e-4  # on logits whose standard deviation is about 1
STEP = 2.0**-6  # see make_golden.py
PAGE_SIZE = 8
PAGES = ((3, 7, 2, 9, 11), (4, 6, 13, 5, 8))  # of the two sequences; neither in order nor side by side


@functools.cache
def load(case: str) -> tuple[Model, dict[str, Any], list[np.ndarray], list[np.ndarray]]:
    """Model, parameters (one dict a layer), prompts [T] and their logits [T, V]."""
    arrays = np.load(GOLDEN / f"{case}.npz")
    model = get_model(json.loads(str(arrays["config"])))
    weights = {name[2:]: arrays[name].astype(np.float32) * STEP for name in arrays.files if name.startswith("w:")}
    prompts, logits = ([arrays[f"{kind}_{i}"] for i in range(2)] for kind in ("tokens", "logits"))
    return model, build_params(model, weights), prompts, logits


def build_params(model: Model, weights: dict[str, np.ndarray]) -> dict[str, Any]:
    """The parameters from tensors under their checkpoint names; every element must be given."""
    host = jax.tree.map(lambda leaf: np.full(leaf.shape, np.nan, np.float32), model.abstract_params(jnp.float32))
    for name, weight in weights.items():
        target = model.translate(name)
        if target is not None:
            leaf = functools.reduce(lambda tree, key: tree[key], target.path, host)
            assert leaf[target.index(model.config)].shape == weight.shape, name
            leaf[target.index(model.config)] = weight
    assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves(host))
    return jax.tree.map(jnp.asarray, host)


@functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})  # compiles faster
def run_step(
    model: Model, params: Any, kv: dict[str, KVCache], batch: StepBatch
) -> tuple[jax.Array, dict[str, KVCache]]:
    hidden, kv, _ = forward(model, params, kv, batch)
    return model.logits(params, hidden), kv


class Paged:
    """Two sequences in a paged cache; pages that hold nothing are NaN.

    Every step has two decode rows and MAX_PREFILL prefill rows, some of them padding, so that a model compiles once.
    """

    MAX_PREFILL = 64

    def __init__(self, model: Model, params: Any):
        self.model, self.params = model, params
        empty = init_kv_cache(model.config, num_pages=14, page_size=PAGE_SIZE, dtype=jnp.float32)
        self.kv = jax.tree.map(lambda pages: jnp.full_like(pages, jnp.nan), empty)
        self.lens = [0, 0]

    def step(
        self, prefill: dict[int, np.ndarray] | None = None, decode: dict[int, np.ndarray] | None = None
    ) -> dict[int, np.ndarray]:
        """Logits of the next tokens of some sequences. A sequence is in one region, and decodes one token."""
        prefill, decode = prefill or {}, decode or {}
        counts = [len(prefill.get(s, ())) for s in (0, 1)]
        cu_q_lens = np.cumsum([0, *counts])
        places = {s: slice(s, s + 1) for s in decode} | {
            s: slice(2 + cu_q_lens[s], 2 + cu_q_lens[s + 1]) for s in prefill
        }
        token_ids, positions, page_ids = (np.zeros(2 + self.MAX_PREFILL, np.int32) for _ in range(3))
        for s, tokens in (prefill | decode).items():
            token_ids[places[s]] = tokens
            positions[places[s]] = np.arange(self.lens[s], self.lens[s] + len(tokens))
            page_ids[places[s]] = np.take(PAGES[s], positions[places[s]] // PAGE_SIZE)
            self.lens[s] += len(tokens)
        batch = StepBatch(
            token_ids=jnp.asarray(token_ids),
            positions=jnp.asarray(positions),
            page_ids=jnp.asarray(page_ids),
            page_offsets=jnp.asarray(positions % PAGE_SIZE),
            decode=self._region(decode, None),
            prefill=self._region(prefill, jnp.asarray(cu_q_lens, jnp.int32)),
        )
        logits, self.kv = run_step(self.model, self.params, self.kv, batch)
        return {s: np.asarray(logits)[place] for s, place in places.items()}

    def _region(self, sequences: dict[int, np.ndarray], cu_q_lens: jax.Array | None) -> AttentionBatch:
        kv_lens = jnp.asarray([self.lens[s] if s in sequences else 0 for s in (0, 1)], jnp.int32)
        return AttentionBatch(page_table=jnp.asarray(PAGES, jnp.int32), kv_lens=kv_lens, cu_q_lens=cu_q_lens)


def whole(model: Model, params: Any, prompts: list[np.ndarray]) -> list[np.ndarray]:
    """Logits of both prompts, prefilled in one step."""
    logits = Paged(model, params).step(prefill=dict(enumerate(prompts)))
    return [logits[0], logits[1]]


def largest_error(logits: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """inf where a logit is NaN."""
    errors = [np.abs(got - want).max() for got, want in zip(logits, expected, strict=True)]
    return float(np.nan_to_num(errors, nan=np.inf).max())
