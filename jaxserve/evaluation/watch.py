"""A model that reads a prompt once and is then asked under several policies: what it says, and what attention reads.

How this works. Prompts pass the layers in chunks, into a paged cache of their own. Unless a policy is for prompts too,
all policies share what dense attention wrote there, and what they keep of the pages is worked out from it afterwards.
An answer is a prefill region, whose rows go through the decode policy row by row, as when the engine computes an answer
again. So one pass over a known answer tells what decoding it token by token would.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve.evaluation.watched import NO_SHARES, Watched
from jaxserve.layers.attention import prepare_batch, rotate_and_write
from jaxserve.layers.decoder import Attend
from jaxserve.layers.kv_cache import AttentionBatch, KVCache, StepBatch, init_kv_cache
from jaxserve.layers.sparse import LayerPolicies, Layout, SparseAttention
from jaxserve.layers.sparse.attend import attend_rows, rows_by_policy, select_rows
from jaxserve.layers.sparse.page_meta import fold
from jaxserve.layers.sparse.selection import tables_of
from jaxserve.layers.sparse.state import begin_step, init_state
from jaxserve.models import Model
from jaxserve.pallas_kernels.paged_attention import paged_attention
from jaxserve.weights import LoadedModel

CHUNK = 1024  # most tokens of a pass


class Prompt(NamedTuple):
    """A prompt that was read, all but its last page, or what there is of it: that goes with the question."""

    token_ids: list[int]
    sparse: SparseAttention | None  # what it is asked under
    kv: dict[str, KVCache]
    shares: np.ndarray  # as in `Watched`, of its own tokens, where a policy is for prompts


class Reader:
    """Reads prompts and answers of up to `max_tokens` together with one model, on one device.

    Args:
        loaded: with parameters as a tuple of layers.
        on_pass: called after each pass of up to CHUNK tokens.
    Raises:
        ValueError: more tokens than the model has positions for.
    """

    def __init__(
        self, loaded: LoadedModel, *, max_tokens: int, page_size: int, on_pass: Callable[[], None] = lambda: None
    ) -> None:
        most = loaded.model.config.max_position_embeddings
        if max_tokens > most:
            raise ValueError(
                f"num_tokens must be at most {most}, the model's context, got {max_tokens}; lower --num-tokens"
            )
        self.loaded, self.page_size, self.max_tokens = loaded, page_size, max_tokens
        self.num_pages = -(-max_tokens // page_size)
        self._chunk = max(1, CHUNK // page_size) * page_size  # whole pages, which some policies take together
        self._on_pass = on_pass

    def check(self, sparse: SparseAttention | None) -> None:
        """Raises ValueError where policies do not fit the model or the page size, or drop tokens."""
        config = self.loaded.model.config
        if sparse is not None:
            if sparse.drops:
                raise ValueError(
                    f"an evaluation takes policies that select pages, got one that drops tokens: {sparse.decode}"
                )
            layout = Layout(config.layer_kinds, config.num_kv_heads, 1, config.kv_head_copies)
            sparse.check(self.page_size, layout)

    def num_passes(self, num_prompt: int, num_answer: int | None = None) -> int:
        """How many passes `read` takes for a prompt of so many tokens, or `ask` for an answer to it."""
        num_read = self._num_read(num_prompt)
        num_tokens = num_read if num_answer is None else num_prompt - num_read + num_answer - 1
        return -(-num_tokens // self._chunk)

    def _num_read(self, num_prompt: int) -> int:
        """Tokens of a prompt that are read before the question; its last one is not."""
        return (num_prompt - 1) // self.page_size * self.page_size

    def read(self, token_ids: Sequence[int], sparse: SparseAttention | None = None) -> Prompt:
        """The prompt, to be asked under these policies.

        Raises:
            ValueError: policies that do not fit, an empty prompt, or one that leaves no room for an answer.
        """
        if not 0 < len(token_ids) < self.max_tokens:
            raise ValueError(f"a prompt must have 1 to {self.max_tokens - 1} tokens, got {len(token_ids)}")
        self.check(sparse)
        config, dtype = self.loaded.model.config, self.loaded.params["final_norm"].dtype
        kv = init_kv_cache(config, num_pages=self.num_pages + 1, page_size=self.page_size, dtype=dtype)
        prompt = Prompt(list(token_ids), None, kv, NO_SHARES)
        if needs_own_prompt(sparse):
            prompt = self._with_state(prompt, sparse, 0)
        end = self._num_read(len(token_ids))
        for start in range(0, end, self._chunk):
            part = prompt.token_ids[start : min(end, start + self._chunk)]
            _, kv, shares = self._pass(prompt.kv, prompt.sparse, part, start, len(token_ids), is_prompt=True)
            prompt = prompt._replace(kv=kv, shares=prompt.shares + shares)
        return prompt if needs_own_prompt(sparse) else self.under(prompt, sparse)

    def under(self, prompt: Prompt, sparse: SparseAttention | None) -> Prompt:
        """A prompt that dense attention has read, to be asked under policies that leave prompts dense.

        Raises:
            ValueError: policies that do not fit, or a prompt that was read otherwise.
        """
        self.check(sparse)
        if prompt.sparse is not None or needs_own_prompt(sparse):
            raise ValueError(f"the prompt was read under {prompt.sparse}, and cannot be asked under {sparse}")
        return prompt if sparse is None else self._with_state(prompt, sparse, self._num_read(len(prompt.token_ids)))

    def ask(self, prompt: Prompt, answer: Sequence[int]) -> Watched:
        """What the model says of an answer to the prompt, which stays as it is.

        Raises:
            ValueError: an empty or too long answer.
        """
        num_prompt = len(prompt.token_ids)
        if not 0 < len(answer) <= self.max_tokens - num_prompt:
            raise ValueError(f"an answer may have 1 to {self.max_tokens - num_prompt} tokens, got {len(answer)}")
        kv, shares, found = jax.tree.map(jnp.copy, prompt.kv), prompt.shares, []
        first = self._num_read(num_prompt)
        token_ids = [*prompt.token_ids[first:], *answer[:-1]]  # nobody asks what follows the last one
        for start in range(0, len(token_ids), self._chunk):
            part = token_ids[start : start + self._chunk]
            x, kv, more = self._pass(kv, prompt.sparse, part, first + start, num_prompt, is_prompt=False)
            found.append(_logprobs(self.loaded.model, self.loaded.params, x)[: len(part)])
            shares = shares + more
        return Watched(np.concatenate(found)[-len(answer) :], shares)

    def _with_state(self, prompt: Prompt, sparse: SparseAttention, num_written: int) -> Prompt:
        """A copy of the prompt, with what the policies keep of the tokens written."""
        positions = np.arange(self.num_pages * self.page_size)
        page_ids = np.where(positions < num_written, 1 + positions // self.page_size, 0)
        kv = jax.tree.map(jnp.copy, prompt.kv)
        head_dim = self.loaded.model.config.head_dim
        kv["full"] = _kept(kv["full"], sparse, head_dim, self.num_pages, page_ids, positions % self.page_size)
        return prompt._replace(sparse=sparse, kv=kv)

    def _pass(
        self,
        kv: dict[str, KVCache],
        sparse: SparseAttention | None,
        token_ids: Sequence[int],
        start: int,
        num_prompt: int,
        *,
        is_prompt: bool,
    ) -> tuple[Array, dict[str, KVCache], np.ndarray]:
        """Hidden states of tokens at positions from `start` on (and padding), the cache, which is donated, and shares.

        What the last layer makes of a prompt is not needed, unless its policy is watched.
        """
        model, params = self.loaded.model, self.loaded.params
        num_rows = len(token_ids)  # few sizes, so that few programs serve all
        size = max(16, 1 << (num_rows - 1).bit_length()) if num_rows <= 256 else -(-num_rows // 256) * 256
        batch, _ = as_batch(token_ids, num_prompt, self.page_size, start=start, size=size, num_pages=self.num_pages)
        x, found, kv = model.embed(params, batch.token_ids), [], dict(kv)
        counts = {"num_decode": 0, "num_prefill": size, "max_pages": self.num_pages}
        kv["full"] = begin_step(sparse, kv["full"], model.config.head_dim, **counts)
        last = len(model.layer_kinds)
        for lo, hi, policies in sparse.segments(0, last) if sparse else [(0, last, None)]:
            for i in range(lo, hi):
                kind = model.layer_kinds[i]
                index = np.int32(model.layer_kinds[:i].count(kind))
                reads = policies is not None or not is_prompt or i + 1 < last
                p = params["layers"][i]
                x, kv[kind], shares = _layer(model, kind, policies, reads, p, x, kv[kind], index, batch)
                found += shares
        jax.block_until_ready(x)
        self._on_pass()
        return x, kv, np.sum(np.asarray(found), axis=0) if found else NO_SHARES


def as_batch(
    token_ids: Sequence[int],
    num_prompt: int,
    page_size: int,
    *,
    start: int = 0,
    size: int | None = None,
    num_pages: int | None = None,
) -> tuple[StepBatch, int]:
    """The tokens at positions from `start` on as one prefill step of slot 0, and its pages; they begin with page 1.

    Args:
        size: rows, of which the last ones are padding; None = as many as tokens.
        num_pages: in the table; None = as many as the tokens need.
    """
    end, size = start + len(token_ids), size or len(token_ids)
    num_pages = num_pages or -(-end // page_size)
    is_token = np.arange(size) < len(token_ids)
    positions = np.where(is_token, start + np.arange(size), 0)
    region = AttentionBatch(
        page_table=1 + jnp.arange(num_pages)[None],
        kv_lens=jnp.array([end]),
        cu_q_lens=jnp.array([0, len(token_ids)]),
        slots=jnp.zeros(1, jnp.int32),
        prompt_lens=jnp.array([num_prompt]),
    )
    batch = StepBatch(
        token_ids=jnp.asarray(np.pad(token_ids, (0, size - len(token_ids))), jnp.int32),
        positions=jnp.asarray(positions, jnp.int32),
        page_ids=jnp.asarray(np.where(is_token, 1 + positions // page_size, 0), jnp.int32),
        page_offsets=jnp.asarray(positions % page_size, jnp.int32),
        decode=None,
        prefill=region,
    )
    return batch, num_pages


def needs_own_prompt(sparse: SparseAttention | None) -> TypeGuard[SparseAttention]:
    """Whether prompts are read otherwise than by dense attention."""
    return sparse is not None and sparse.prefill is not None


@functools.partial(jax.jit, static_argnums=(1, 2, 3), donate_argnums=0)
def _kept(
    kv: KVCache, sparse: SparseAttention, head_dim: int, max_pages: int, page_ids: Array, page_offsets: Array
) -> KVCache:
    """The cache with what policies keep of the keys that were written at these places."""
    kv = init_state(sparse, kv, head_dim, num_slots=1, max_pages=max_pages)
    page_meta = sparse.page_meta
    if page_meta is None:
        return kv

    def one(layer: Array, kv: KVCache) -> KVCache:
        return fold(kv, layer, page_meta, head_dim, page_ids, page_offsets)

    return jax.lax.fori_loop(0, kv.k.shape[0], one, kv)


@functools.partial(jax.jit, static_argnums=0)
def _logprobs(model: Model, params: dict[str, Any], x: Array) -> Array:
    return jax.nn.log_softmax(model.logits(params, model.final_norm(params, x)))


@dataclasses.dataclass(kw_only=True)
class _Watching(Attend):
    """Attention that also keeps, for each policy, the sums over its rows of recall and density, and their number."""

    reads: bool  # False: keys and values are written, and that is all
    shares: list[Array] = dataclasses.field(default_factory=list)

    def __call__(self, heads: Array) -> Array:
        q, kv = rotate_and_write(heads, self.cache, self.index, self.batch, self.spec.num_kv_heads)
        options = {"scale": self.spec.scale, "sliding_window": self.spec.sliding_window, "soft_cap": self.spec.soft_cap}
        if not self.reads:
            self.cache = kv
            return jnp.zeros_like(q[:, : self.spec.num_heads])

        def attention(rows: Array, region: AttentionBatch, skip_below: Array | None = None) -> tuple[Array, Array]:
            return paged_attention(rows, kv, self.index, region, **options, skip_below=skip_below, return_lse=True)

        assert self.batch.prefill is not None
        dense = out = attention(q, self.batch.prefill)
        sparse = self.batch.sparse
        if sparse is not None:
            assert sparse.prefill is not None
            for policy, rows in rows_by_policy(sparse.policies, q, sparse.prefill):
                numbers, kv = select_rows(policy, rows, kv, self.index, attention)
                out = attend_rows(policy, rows, numbers, kv, attention, out)
                tables = tables_of(numbers, rows.page_table, rows.seen, kv.page_size, kv.k.shape[1])
                recall = jnp.mean(jnp.exp(out[1] - dense[1])[:, : self.spec.num_heads], axis=1)
                density = jnp.mean(
                    tables.kv_lens[:, : self.spec.num_kv_heads] / jnp.maximum(rows.seen, 1)[:, None], axis=1
                )
                found = jnp.stack([recall, density, jnp.ones_like(recall)])
                self.shares.append(jnp.sum(found, axis=1, where=(rows.seen > 0)[None]))
        self.cache = kv
        return out[0][:, : self.spec.num_heads]


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=6)
def _layer(
    model: Model,
    kind: str,
    policies: LayerPolicies | None,
    reads: bool,
    p: dict[str, Any],
    x: Array,
    kv: KVCache,
    index: Array,
    batch: StepBatch,
) -> tuple[Array, KVCache, list[Array]]:
    spec = model.attention_spec(kind)
    attention = _Watching(
        cache=kv,
        index=index,
        batch=prepare_batch(batch, kv, spec, policies=policies),
        spec=spec,
        implementation=None,
        experts_read=jnp.int32(0) if model.has_experts else None,
        reads=reads,
    )
    x = model.layer(p, kind, x, attention)
    return x, attention.cache, attention.shares
