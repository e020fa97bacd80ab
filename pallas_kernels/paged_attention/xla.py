"""Paged attention in plain XLA (first form: dense over the whole page table)."""

import jax
import jax.numpy as jnp


def paged_attention(q, kv, layer, batch, *, scale, sliding_window=None, soft_cap=None):
    rows, N, H = q.shape
    K = kv.k.shape[-2]
    S = batch.page_table.shape[0]
    if batch.cu_q_lens is None:
        seq = jnp.arange(rows) // batch.max_q_len
        pos = batch.kv_lens[seq] - batch.max_q_len + jnp.arange(rows) % batch.max_q_len
    else:
        seq = jnp.searchsorted(batch.cu_q_lens, jnp.arange(rows), side="right") - 1
        real = seq < S
        seq = jnp.minimum(seq, S - 1)
        pos = jnp.where(real, batch.kv_lens[seq] - batch.cu_q_lens[seq + 1] + jnp.arange(rows), -1)
    k = kv.k[layer, batch.page_table].reshape(S, -1, K, H)
    v = kv.v[layer, batch.page_table].reshape(S, -1, K, H)
    j = jnp.arange(k.shape[1])
    v = jnp.where((j[None] < batch.kv_lens[:, None])[:, :, None, None], v, 0)
    qg = q.reshape(rows, K, N // K, H).astype(jnp.float32)
    s = jnp.einsum("tkgh,tjkh->tkgj", qg, k[seq].astype(jnp.float32)) * scale
    s = s if soft_cap is None else soft_cap * jnp.tanh(s / soft_cap)
    mask = j[None] <= pos[:, None]
    if sliding_window is not None:
        mask &= pos[:, None] - j[None] < sliding_window
    s = jnp.where(mask[:, None, None, :], s, -jnp.inf)
    lse = jax.nn.logsumexp(s, axis=-1)
    p = jnp.where(mask[:, None, None, :], jnp.exp(s - jnp.where(jnp.isinf(lse), 0, lse)[..., None]), 0.0)
    out = jnp.einsum("tkgj,tjkh->tkgh", p, v[seq].astype(jnp.float32))
    return out.reshape(rows, N, H).astype(q.dtype), lse.reshape(rows, N)
