"""What the TPU kernel of paged attention should reach, predicted from its code: no TPU was at hand.

    paged_tpu_CHIP_decode      share of the HBM's bandwidth, 64 sequences of 8,192 tokens that decode
    paged_tpu_CHIP_decode_fp8  the same with pages in float8_e4m3fn
    prefill_tpu_CHIP           share of the peak of bfloat16 matmuls, attention of a prompt of 8,192 tokens

Heads are those of Llama-3.1-8B: 32 of queries, 8 of keys and values, of 128. The kernel is compiled by libtpu, which
lists its instruction bundles, a cycle each. A region takes the longest of: its copies' bytes / bandwidth; its bundles,
each loop's as often as it runs / clock; its matmuls / peak. Nothing of the latency of a copy, a wait for the matrix
unit or a conflict in memory is in that. The clock is what gives the peak of four matrix units (128 x 128 on v5, else
256 x 256): 1.5 GHz on a v5e, 1.75 on v5p and v6e, 2.2 on a 7x. The figure beside ours is that of Ragged Paged Attention
v3 on a TPU7x as published (arXiv 2604.15464): 86 % of the bandwidth and 73 % of the peak, measured.

JAX_PLATFORMS=cpu PYTHONPATH=.venv/ahead-of-time python -m benchmarks.tpu [--save DIR]    # about a minute; needs libtpu
"""

import argparse
import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from benchmarks._report import Row, report
from benchmarks._tpu_bundles import Loop, read
from jaxserve.layers.kv_cache import position_shape
from jaxserve.pallas_kernels import tpu
from jaxserve.pallas_kernels.paged_attention import AttentionBatch, KVCache, paged_attention, tpu_work
from jaxserve.topologies import WITHOUT_TPU

N, K, H = 32, 8, 128
PAGE_SIZE, SEQS, CONTEXT = 64, 64, 8192
CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "7x": "tpu7x:2x2x1"}
MXU_SIZE = {"v5e": 128, "v5p": 128, "v6e": 256, "7x": 256}
CASES = {"decode": jnp.bfloat16, "decode_fp8": jnp.float8_e4m3fn, "prefill": jnp.bfloat16}


class Prediction(NamedTuple):
    """Seconds of a region on one core."""

    copies_s: float
    bundles_s: float
    matmuls_s: float

    @property
    def total_s(self) -> float:
        return max(self)


def shapes(case: str, struct: Any) -> tuple[jax.ShapeDtypeStruct, KVCache, AttentionBatch]:
    """Queries, a cache of 2 layers that is far too large to be copied, and the batch."""
    pages = struct((2, SEQS * CONTEXT // PAGE_SIZE, PAGE_SIZE, *position_shape(K, H, CASES[case], "tpu")), CASES[case])
    scale = struct((2, K), jnp.float32) if case == "decode_fp8" else None
    prompt = case == "prefill"
    seqs, rows = (1, CONTEXT) if prompt else (SEQS, SEQS)
    batch = AttentionBatch(
        page_table=struct((seqs, CONTEXT // PAGE_SIZE), jnp.int32),
        kv_lens=struct((seqs,), jnp.int32),
        cu_q_lens=struct((seqs + 1,), jnp.int32) if prompt else None,
        max_q_len=1,
    )
    return struct((rows, N, H), jnp.bfloat16), KVCache(k=pages, v=pages, k_scale=scale, v_scale=scale), batch


def compile_one(chip: str, case: str) -> None:
    """In a process of its own: libtpu reads once where to write its listings."""
    device = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip]).devices[0]
    struct = functools.partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(device))
    attention = functools.partial(paged_attention, scale=H**-0.5, implementation="mosaic_tpu")
    with jax.default_device(device):
        q, kv, batch = shapes(case, struct)
        jax.jit(attention).lower(q, kv, struct((), jnp.int32), batch).compile()
        sizes, of_chip = tpu_work.tiling(kv, q.shape[0], N, H, batch), tpu.chip()
    predict = _prefill if case == "prefill" else _decode
    folder = Path(os.environ["LISTINGS"])
    clock = of_chip.bf16_ops_per_second / (4 * 2 * MXU_SIZE[chip] ** 2)
    print(repr(tuple(predict(read(folder, "paged_attention"), sizes, of_chip, clock))))
    print(of_chip.bf16_ops_per_second)


def _block_bundles(block: Loop, sizes: tpu_work.Tiling) -> int:
    """Of a block of pages that is seen whole: the loops of its copies' starts and waits, and all else but those that
    clear what is after the last position and that mask.
    """
    starts, waits = block.loops[:2]
    return block.own + sizes.pages * (starts.bundles + waits.bundles)


def _decode(kernel: Loop, sizes: tpu_work.Tiling, chip: Any, clock: float) -> Prediction:
    (tile,) = kernel.loops
    block = max(tile.loops, key=lambda loop: loop.bundles)
    blocks, tiles = -(-CONTEXT // sizes.block), SEQS / sizes.cores
    position_bytes = 2 * sizes.position_rows * tpu_work.LANES * sizes.itemsize
    matmuls = 2 * 2 * sizes.rows * sizes.columns * tpu_work.LANES
    return Prediction(
        copies_s=tiles * CONTEXT * position_bytes / chip.mem_bw_bytes_per_second,
        bundles_s=tiles * (tile.own + blocks * _block_bundles(block, sizes)) / clock,
        matmuls_s=tiles * blocks * matmuls / chip.bf16_ops_per_second,
    )


def _prefill(kernel: Loop, sizes: tpu_work.Tiling, chip: Any, clock: float) -> Prediction:
    """Each tile sees the blocks before it whole, and its own with a mask."""
    (tile,) = kernel.loops
    block = max(tile.loops, key=lambda loop: loop.bundles)
    writes = tile.loops[-1]
    masked = block.loops[-1]
    tiles = -(-CONTEXT // sizes.tokens)
    own = -(-sizes.tokens // sizes.block)
    whole = sum(t * sizes.tokens // sizes.block for t in range(tiles))
    whole_bundles = _block_bundles(block, sizes)
    heads_a_turn = max(part for part in block.parts if isinstance(part, int))  # the stretch without masks
    masked_bundles = whole_bundles - heads_a_turn + masked.bundles * sizes.passes // 2
    bundles = whole * whole_bundles + tiles * (own * masked_bundles + tile.own + sizes.passes * writes.bundles)
    position_bytes = 2 * sizes.position_rows * tpu_work.LANES * sizes.itemsize
    blocks = whole + tiles * own
    return Prediction(
        copies_s=blocks * sizes.block * position_bytes / chip.mem_bw_bytes_per_second / sizes.cores,
        bundles_s=bundles / clock / sizes.cores,
        matmuls_s=blocks * 2 * 2 * sizes.passes * sizes.rows * sizes.block * H / chip.bf16_ops_per_second / sizes.cores,
    )


def row(chip: str, case: str) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        listings = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        environment = {**os.environ, **WITHOUT_TPU, "LIBTPU_INIT_ARGS": listings, "LISTINGS": folder}
        command = [sys.executable, "-m", "benchmarks.tpu", "--one", chip, case]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{chip} {case}: {result.stderr[-2000:]}")
    prediction, peak = (eval(line, {}) for line in result.stdout.splitlines()[-2:])
    prediction = Prediction(*prediction)
    print(f"{chip} {case}: {', '.join(f'{n} {1e6 * s:.0f} us' for n, s in prediction._asdict().items())}", flush=True)
    if case == "prefill":
        useful = 2 * 2 * N * H * CONTEXT * CONTEXT / 2  # on and below the diagonal
        cores = 2 if chip == "v5p" else 1
        share = useful / (peak * cores) / prediction.total_s
        return Row(name=f"prefill_tpu_{chip}", value=100 * share, unit="% of peak", target=45, stretch=60)
    share = prediction.copies_s / prediction.total_s
    return Row(name=f"paged_tpu_{chip}_{case}", value=100 * share, unit="% of bandwidth", target=80, stretch=86)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        compile_one(*args.one)
        return
    rows = [row(chip, case) for case in CASES for chip in CHIPS]
    report(rows, title="predicted", save=args.save and args.save / "tpu_predictions.jsonl")


if __name__ == "__main__":
    main()
