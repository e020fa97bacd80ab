"""The paged attention kernels on one Hopper GPU, beside FlashInfer in the same run and FlashAttention-3's figures.

    paged_decode_BxC_N/K_pageP  microseconds of one call, B sequences of C tokens; the peer is FlashInfer's batch decode
                                (tensor cores), or FlashAttention-3's figure at page size 64 where that is absent
    paged_decode_geomean        geometric mean of the ratios
    paged_decode_ragged         GB/s at 64 lengths of 128 to 131,072; the peer is a uniform batch of as many tokens
    paged_prefill_T_of_C        TFLOP/s of a causal chunk of T tokens that ends a context of C

Both sides plan once, and run as engines run them: calls in a row that the host launches as one, here in one XLA
program, there in one CUDA graph. FlashInfer needs torch with CUDA, nvcc, and the wheels flashinfer-python 0.6.12 and
apache-tvm-ffi 0.1.9; without it, FlashAttention-3's figures stand in and say so.

    XLA_PYTHON_CLIENT_MEM_FRACTION=.4 python -m benchmarks.paged_attention [--save DIR]
"""

import argparse
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from benchmarks import shapes
from benchmarks._report import Row, report
from jaxserve.pallas_kernels.paged_attention import (
    AttentionBatch,
    Implementation,
    KVCache,
    paged_attention,
    prepare,
)

try:
    import flashinfer
    import torch
except ImportError:
    flashinfer = torch = None

H = shapes.HEAD_DIM
CALLS = 100  # of decode attention that are launched as one: what the host takes to launch them is then less than 1 %
FP8_MUST = 0.6  # of the time with pages in bfloat16
GEOMEAN_MUST, ROW_MUST, RAGGED_MUST, PREFILL_MUST = 0.97, 0.93, 0.9, 0.85


def cache(
    kv_lens: np.ndarray, num_kv_heads: int, page_size: int, head_dim: int = H, dtype: DTypeLike = jnp.bfloat16
) -> tuple[KVCache, Array]:
    """Random keys and values, and a page table in random order."""
    counts = -(-kv_lens // page_size)
    ids = 1 + np.random.default_rng(0).permutation(counts.sum())
    table = np.zeros((len(kv_lens), counts.max()), np.int32)
    for row, part in zip(table, np.split(ids, np.cumsum(counts)[:-1]), strict=True):
        row[: len(part)] = part
    shape = (1, int(counts.sum()) + 1, page_size, num_kv_heads, head_dim)
    k, v = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16).astype(dtype) for i in range(2))
    scale = jnp.ones((1, num_kv_heads)) if dtype == jnp.float8_e4m3fn else None
    return KVCache(k=k, v=v, k_scale=scale, v_scale=scale), jnp.asarray(table)


def attention_s(
    q: Array,
    kv: KVCache,
    batch: AttentionBatch,
    *,
    calls: int,
    implementation: Implementation | None = "mosaic_gpu",
) -> float:
    """Seconds of one call, planned before."""
    options = {"scale": q.shape[-1] ** -0.5, "implementation": implementation}
    rows = {"num_rows": q.shape[0], "num_heads": q.shape[1]}
    plan = functools.partial(prepare, **rows, sliding_window=None, implementation=implementation)
    batch = jax.jit(plan)(batch, kv)
    attend = jax.jit(functools.partial(paged_attention, **options))

    @jax.jit
    def run(q: Array, kv: KVCache, layer: Array, batch: AttentionBatch) -> Array:
        return jax.lax.fori_loop(0, calls, lambda _, q: attend(q, kv, layer, batch), q, unroll=5)  # outputs are queries

    layer = jnp.int32(0)
    return timed(lambda: run(q, kv, layer, batch), jax.block_until_ready) / calls


def timed(launch: Callable, wait: Callable) -> float:
    """Median seconds of what one launch starts, over launches that are queued up."""
    wait(launch())
    times = []
    for _ in range(7):
        began = time.perf_counter()
        launch()
        wait(launch())
        times.append((time.perf_counter() - began) / 2)
    return statistics.median(times)


def decode_s(
    kv_lens: np.ndarray,
    num_heads: int,
    num_kv_heads: int,
    page_size: int,
    head_dim: int = H,
    dtype: DTypeLike = jnp.bfloat16,
) -> float:
    kv, table = cache(kv_lens, num_kv_heads, page_size, head_dim, dtype)
    q = jax.random.normal(jax.random.key(2), (len(kv_lens), num_heads, head_dim), jnp.bfloat16)
    batch = AttentionBatch(page_table=table, kv_lens=jnp.asarray(kv_lens, jnp.int32))
    return attention_s(q, kv, batch, calls=CALLS)


def flashinfer_s(shape: shapes.Decode) -> float:
    assert flashinfer is not None
    assert torch is not None
    pages = shape.context // shape.page_size
    kv = torch.randn(
        shape.batch * pages, 2, shape.page_size, shape.num_kv_heads, H, device="cuda", dtype=torch.bfloat16
    )
    table = torch.randperm(shape.batch * pages, device="cuda", dtype=torch.int32)
    starts = torch.arange(shape.batch + 1, device="cuda", dtype=torch.int32) * pages
    last = torch.full((shape.batch,), shape.page_size, device="cuda", dtype=torch.int32)
    workspace = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    decode.plan(starts, table, last, shape.num_heads, shape.num_kv_heads, H, shape.page_size, **dtypes)
    q = torch.randn(shape.batch, shape.num_heads, H, device="cuda", dtype=torch.bfloat16)
    decode.run(q, kv)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            decode.run(q, kv)
    return timed(graph.replay, lambda _: torch.cuda.synchronize()) / CALLS


def decode_row(shape: shapes.Decode) -> Row:
    seconds = decode_s(np.full(shape.batch, shape.context), shape.num_heads, shape.num_kv_heads, shape.page_size)
    runs_flashinfer = flashinfer is not None and shape.flashinfer
    return Row(
        name=shape.name if runs_flashinfer else f"{shape.name}; peer: FlashAttention-3's figure",
        value=1e6 * seconds,
        unit="us",
        peer=1e6 * flashinfer_s(shape) if runs_flashinfer else shape.fa3_us,
        target=ROW_MUST,
        stretch=0.97,
        lower_is_better=True,
    )


def ragged_row() -> Row:
    lengths = np.exp(np.random.default_rng(0).uniform(math.log(128), math.log(32_768), 63)).astype(int)
    lengths = np.append(lengths, 131_072)
    uniform = np.full(len(lengths), lengths.sum() // len(lengths))
    rates = [
        n.sum() * 2 * 8 * H * 2 / decode_s(n, num_heads=32, num_kv_heads=8, page_size=64) / 1e9
        for n in (lengths, uniform)
    ]
    return Row(name="paged_decode_ragged", value=rates[0], unit="GB/s", peer=rates[1], target=RAGGED_MUST)


def fp8_row() -> Row:
    """A cache in float8 beside bfloat16: half of the bytes, which have to be widened."""
    wide, fp8 = (decode_s(np.full(64, 8192), 32, 8, 64, dtype=dtype) for dtype in (jnp.bfloat16, jnp.float8_e4m3fn))
    return Row(
        name="paged_decode_64x8192_fp8_kv; peer: bfloat16",
        value=1e6 * fp8,
        unit="us",
        peer=1e6 * wide,
        target=1 / FP8_MUST,
        stretch=1 / 0.55,
        lower_is_better=True,
    )


def prefill_s(shape: shapes.Prefill, head_dim: int = H, dtype: DTypeLike = jnp.bfloat16) -> float:
    kv, table = cache(np.array([shape.context]), shape.num_kv_heads, shape.page_size, head_dim, dtype)
    q = jax.random.normal(jax.random.key(2), (shape.chunk, shape.num_heads, head_dim), jnp.bfloat16)
    batch = AttentionBatch(
        page_table=table,
        kv_lens=jnp.array([shape.context], jnp.int32),
        cu_q_lens=jnp.array([0, shape.chunk], jnp.int32),
    )
    return attention_s(q, kv, batch, calls=10)


def prefill_row(shape: shapes.Prefill) -> Row:
    seconds = prefill_s(shape)
    flops = 4 * shape.num_heads * H * shape.chunk * (shape.context - shape.chunk / 2)
    rate = flops / seconds / 1e12
    return Row(name=shape.name, value=rate, unit="TFLOP/s", peer=shape.fa3_tflops, target=PREFILL_MUST, stretch=1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, help="folder for the rows as paged_attention.jsonl")
    save = parser.parse_args().save
    rows = []
    pages_of_16 = [dataclasses.replace(shape, page_size=16) for shape in shapes.DECODE if shape.flashinfer]
    for shape in [*shapes.DECODE, *(pages_of_16 if flashinfer else [])]:
        rows.append(decode_row(shape))
        print(rows[-1].as_dict(), flush=True)
    ratios = [row.ratio for row in rows if row.ratio is not None]
    name = "paged_decode_geomean" if flashinfer else "paged_decode_geomean; peer: FlashAttention-3's figures"
    rows.append(Row(name=name, value=statistics.geometric_mean(ratios), unit="", target=GEOMEAN_MUST, stretch=1.0))
    rows += [ragged_row(), fp8_row(), *map(prefill_row, shapes.PREFILL)]
    report(rows, save=save and save / "paged_attention.jsonl")


if __name__ == "__main__":
    main()
