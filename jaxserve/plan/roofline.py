"""How long a step takes, from what each rank reads, computes and sends.

How this works. A step's time is a sum: each matmul takes the longer of reading its weights and multiplying its rows;
attention reads keys and values, or multiplies pairs of tokens of a prompt; what lies between the matmuls reads and
writes activations; every kernel takes a little time to begin and to end; and collectives wait for their links. Of data
sheets a share is reached, `Rates` says which.

What the first three of `MEASURED` were fitted to, by `python -m benchmarks.plan --fit`: in benchmarks/results, of
tpot.jsonl the rows tpot_16x128_decode, tpot_64x1024_decode, tpot_256x1024_decode and prefill_64x1024, and of
tpot_qwen3_30b.jsonl tpot_qwen3_30b_1x128_decode (one H200). The other eight decode and prefill rows there were left out
of the fit and are predicted within 10 %; but the form of the model was chosen with all of them in view. `link_share` is
from one all-to-all of 64 MB between two H200s, 178 us of which 23 are latency. `STEP_S` is the row tpot_idle_64 of
step_breakdown.jsonl. Nothing was measured on TPUs, H100s, or more than two GPUs: there the same shares are assumed, and
a microsecond for each kernel of a TPU. Pages in float8 are taken to be read at the same rate as those in bfloat16, and
their prompts to take as long: `jaxserve.plan.advice` says how far that is off.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jaxserve.models import Model, ModelConfig
from jaxserve.pallas_kernels.dense_layer import fits_rows
from jaxserve.pallas_kernels.paged_attention.decode_work import heads_of_tile
from jaxserve.pallas_kernels.rope_kv_write import unsupported_heads
from jaxserve.topologies import Device

STEP_S = 0.11e-3  # between two steps
TPU_KERNEL_S = 1e-6
FUSED_LAYER_KERNELS = 7  # of layers whose dense part is one kernel, which waits for all multiprocessors six times
EXPERT_TILE = 128  # rows of a prompt that an expert multiplies at once; its last tile is half full on average
ITEMSIZE = 2  # bytes of a bfloat16, which weights and activations are in
LOGIT_BYTES = 8  # a logit is written and read as a float32


class Rates(NamedTuple):
    """What is reached of a data sheet, and what a kernel costs beside its work."""

    bandwidth_share: float
    compute_share: float
    kernel_s: float  # on GPUs
    link_share: float


MEASURED = Rates(bandwidth_share=0.905, compute_share=0.684, kernel_s=3.60e-6, link_share=0.46)


class StepTime(NamedTuple):
    """Parts of a step, in seconds."""

    weights_s: float  # matmuls: of reading and multiplying what takes longer
    attention_s: float
    activations_s: float
    kernels_s: float
    collectives_s: float

    @property
    def total_s(self) -> float:
        return sum(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank of a split: what it holds, as the engine splits it, on which device."""

    model: Model  # the whole
    config: ModelConfig  # with the heads of one rank
    kv_parallel_size: int
    tensor_parallel_size: int
    outer_bytes: Mapping[str, int]  # of the weights outside the layers
    layer_bytes: Mapping[str, int]  # of those of one layer
    kv_bytes: int  # of a token in one layer
    page_size: int
    device: Device
    rates: Rates

    @property
    def num_ranks(self) -> int:
        return self.kv_parallel_size * self.tensor_parallel_size

    @property
    def bandwidth(self) -> float:
        return self.device.bandwidth * self.rates.bandwidth_share

    @property
    def flops(self) -> float:
        return self.device.flops * self.rates.compute_share


def decode_step(rank: Rank, *, batch: int, context: int, num_rows: int) -> StepTime:
    """A step in which each of `batch` sequences of `context` tokens decodes.

    Args:
        num_rows: those of the program, which pads.
    """
    layers = (own_tokens(rank, batch, context, kind) for kind in rank.model.layer_kinds)
    read_s = sum(layers) * rank.kv_bytes / rank.bandwidth
    return _step_s(rank, num_rows=num_rows, num_real=batch, num_samples=num_rows, attention_s=read_s)


def prefill_s(rank: Rank, *, num_seqs: int, length: int, budget: int) -> float:
    """Seconds of the steps that read `num_seqs` prompts of this length in, which take up to `budget` tokens each."""
    num_tokens = num_seqs * length
    num_steps = -(-num_tokens // budget)
    pairs = num_seqs * sum(_pairs(rank, length, kind) for kind in rank.model.layer_kinds)
    flops = 4 * rank.config.num_heads * rank.config.head_dim * pairs / rank.kv_parallel_size
    rows = -(-num_tokens // num_steps)
    step = _step_s(rank, num_rows=rows, num_real=rows, num_samples=num_seqs, attention_s=flops / rank.flops / num_steps)
    return num_steps * step.total_s


def own_tokens(rank: Rank, batch: int, context: int, kind: str) -> int:
    """Tokens of all sequences whose keys and values a layer of this kind reads on the rank that has most of them.

    Ranks have the same number of pages of all sequences together, or one less.
    """
    seen, kv = _seen(rank, context, kind), rank.kv_parallel_size
    if kv == 1:
        return batch * seen
    pages = batch * -(-seen // rank.page_size)
    return min(batch * seen, -(-pages // kv) * rank.page_size)


def most_experts(num_experts: int, chance: float, num_ranks: int) -> float:
    """Expected experts that the rank with most of them reads, if each of its `num_experts` is read with this chance."""
    if num_ranks == 1 or chance >= 1.0:
        return num_experts * chance
    count = np.arange(1, num_experts + 1)
    log_ways = np.concatenate([[0.0], np.cumsum(np.log((num_experts - count + 1) / count))])
    counts = np.arange(num_experts + 1)
    log_probability = log_ways + counts * math.log(chance) + (num_experts - counts) * math.log1p(-chance)
    at_most = np.minimum(np.cumsum(np.exp(log_probability)), 1.0)
    return float(np.sum(1.0 - at_most[:-1] ** num_ranks))


def _seen(rank: Rank, length: int, kind: str) -> int:
    """Tokens of a sequence that a layer of this kind reads: a window leaves none out where ranks share the pages."""
    window = rank.model.config.sliding_window if kind == "sliding" and rank.kv_parallel_size == 1 else None
    return min(length, window or length)


def _pairs(rank: Rank, length: int, kind: str) -> float:
    """A query token, a token that it attends to."""
    window = _seen(rank, length, kind)
    return window * length - window * window / 2


def _step_s(rank: Rank, *, num_rows: int, num_real: int, num_samples: int, attention_s: float) -> StepTime:
    config, num_layers = rank.model.config, rank.model.config.num_layers
    head_bytes = rank.outer_bytes.get("lm_head", rank.outer_bytes["embed"])
    layer_s = sum(_matmul_s(rank, name, num_rows, num_real) for name in rank.layer_bytes)
    logits = num_samples * config.vocab_size / rank.num_ranks
    activations = num_layers * num_rows * _elements_a_row(rank) * ITEMSIZE + logits * LOGIT_BYTES
    kernel_s = rank.rates.kernel_s if rank.device.platform == "gpu" else TPU_KERNEL_S
    return StepTime(
        weights_s=num_layers * layer_s + _longer(rank, head_bytes, num_samples),
        attention_s=attention_s,
        activations_s=activations / rank.bandwidth,
        kernels_s=STEP_S + num_layers * _kernels(rank, num_rows) * kernel_s,
        collectives_s=_collectives_s(rank, num_rows),
    )


def _longer(rank: Rank, num_bytes: float, num_rows: float) -> float:
    """Of reading these weights and multiplying so many rows with them."""
    return max(num_bytes / rank.bandwidth, 2 * num_rows * (num_bytes / ITEMSIZE) / rank.flops)


def _matmul_s(rank: Rank, name: str, num_rows: int, num_real: int) -> float:
    config, num_bytes = rank.model.config, rank.layer_bytes[name]
    if not config.num_experts or name not in ("gate_up", "down"):
        return _longer(rank, num_bytes, num_rows)
    top_k, num_experts = config.num_experts_per_tok, -(-config.num_experts // rank.num_ranks)
    chance = -math.expm1(num_real * math.log1p(-top_k / config.num_experts)) if top_k < config.num_experts else 1.0
    num_read = most_experts(num_experts, chance, rank.num_ranks)
    rows = num_real * top_k / config.num_experts * num_experts / num_read  # an expert
    return _longer(rank, num_bytes / num_experts * num_read, rows + EXPERT_TILE / 2)


def _elements_a_row(rank: Rank) -> float:
    """Activations that one row reads and writes in a layer, outside its matmuls."""
    config = rank.model.config
    d = config.hidden_size
    around = 3 * d * _num_norms(rank) + 2 * rank.config.qkv_size  # x, a residual and the result; RoPE in and out
    if not config.num_experts:
        return around + 3 * rank.layer_bytes["down"] / ITEMSIZE / d  # gate, up and their result
    share = -(-config.num_experts // rank.num_ranks) / config.num_experts
    return around + share * config.num_experts_per_tok * (4 * d + 3 * config.moe_intermediate_size)


def _kernels(rank: Rank, num_rows: int) -> int:
    """Kernels of a layer without its collectives, as programs compiled for an H200 have them."""
    config, on_gpu = rank.model.config, rank.device.platform == "gpu"
    beside = _kernels_beside_attention(rank.config) if on_gpu else 0
    if rank.model.plain and rank.num_ranks == 1 and on_gpu and fits_rows(num_rows):
        return FUSED_LAYER_KERNELS + beside
    attention = 5 + config.qk_norm + beside  # qkv, RoPE and the write, attention, merge, o
    kernels = _num_norms(rank) + attention + (6 if config.num_experts else 3)
    if rank.num_ranks > 1:  # a residual after each all-reduce; experts are chosen in plain XLA
        kernels += 2 + (13 if config.num_experts else 0)
    return kernels + (rank.kv_parallel_size > 1)  # packs what is exchanged


def _kernels_beside_attention(config: ModelConfig) -> int:
    """What XLA runs where the heads of a rank do not suit the kernels."""
    writes = 2 if unsupported_heads(config.num_kv_heads, config.head_dim) else 0  # three kernels instead of one
    _, as_they_are = heads_of_tile(config.num_heads, config.num_kv_heads, q_len=1)
    return writes + (0 if as_they_are else 2)  # queries are padded, outputs cut


def _num_norms(rank: Rank) -> int:
    return sum(name.endswith("norm") and name not in ("q_norm", "k_norm") for name in rank.layer_bytes)


def _collectives_s(rank: Rank, num_rows: int) -> float:
    """Two all-reduces a layer and one of the embedding, what greedy rows gather, and one exchange a layer over kv."""
    n, device, config = rank.num_ranks, rank.device, rank.model.config
    if n == 1:
        return 0.0
    link = device.link_bandwidth * rank.rates.link_share
    reduced = 2 * (n - 1) / n * num_rows * config.hidden_size * ITEMSIZE
    small_s = device.all_reduce_s * device.hops(n)
    seconds = (2 * config.num_layers + 1) * (small_s + reduced / link) + small_s
    kv = rank.kv_parallel_size
    if kv > 1:
        sums = 4 / ITEMSIZE  # the log-sum-exp, a float32
        sent = (kv - 1) / kv * num_rows * rank.config.num_heads * (config.head_dim + sums) * ITEMSIZE
        seconds += config.num_layers * (device.all_to_all_s * device.hops(kv) + sent / link)
    return seconds
