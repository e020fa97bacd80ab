"""Decode attention of one layer under a policy on one Hopper GPU, beside dense attention in the same run.

    sparse_P_BxC              microseconds of selection, planning and attention, B sequences of C tokens under policy P;
                              the peer is our dense kernel, which plans once a step and not in each layer
    sparse_P_BxC_flashinfer   the same beside FlashInfer's dense kernel
    sparse_P_BxC_selection    what selection and planning take of that, over the time of our dense kernel
    sparse_P_break_even       context from which on the policy is faster than dense attention, 8 sequences
    sparse_error              of attention to all pages by way of selection, beside dense attention

The heads are those of Llama-3.1-8B, pages have 64 tokens in bfloat16. quest and quest_every_4 read a tenth of the
context, and break even with a budget of 2,048 tokens; streaming_llm reads 1,024. Sequences select in turn where they do
so every fourth token; times are means over all steps. FlashInfer needs what `benchmarks.paged_attention` says. A row
that fails is left out and named at the end.

    XLA_PYTHON_CLIENT_MEM_FRACTION=.4 python -m benchmarks.sparse [--save DIR]
"""

import argparse
import dataclasses
import functools
import math
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks import shapes
from benchmarks._report import Row, report
from benchmarks.paged_attention import CALLS, H, attention_s, cache, flashinfer, flashinfer_s, timed
from jaxserve.layers.sparse import Policy, Quest, StreamingLLM
from jaxserve.layers.sparse.attend import attend_decode
from jaxserve.layers.sparse.hooks import SparseAttention
from jaxserve.layers.sparse.selection import select_pages, tables_of
from jaxserve.layers.sparse.state import init_state
from jaxserve.pallas_kernels.paged_attention import AttentionBatch, KVCache, paged_attention

SHAPES = {shapes.Decode(8, 32, 8, 32_768, 254): (4.0, 5.0), shapes.Decode(4, 32, 8, 131_072, 508): (5.5, 7.0)}
SELECTION_MUST = 0.1
CONTEXTS = (1024, 2048, 4096, 8192, 16_384, 32_768)  # among which a policy breaks even
PHASES = 4  # steps, in each of which other sequences select


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sequences:
    """Random keys, values and metadata, and what a decode step says of the sequences."""

    q: Array
    kv: KVCache
    region: AttentionBatch


def policies(budget: int) -> dict[str, Policy]:
    return {
        "quest": Quest(budget=budget),
        "quest_every_4": Quest(budget=budget, reselect=PHASES),
        "streaming_llm": StreamingLLM(),
    }


def sequences(shape: shapes.Decode, policy: Policy) -> Sequences:
    kv, table = cache(np.full(shape.batch, shape.context), shape.num_kv_heads, shape.page_size)
    sparse = SparseAttention(decode=policy)
    kv = init_state(sparse, kv, H, num_slots=shape.batch, max_pages=table.shape[1])
    if kv.meta is not None:
        kv = dataclasses.replace(kv, meta=jax.random.normal(jax.random.key(3), kv.meta.shape, kv.meta.dtype))
    region = AttentionBatch(
        page_table=table,
        kv_lens=jnp.full(shape.batch, shape.context, jnp.int32),
        slots=jnp.arange(shape.batch, dtype=jnp.int32),
        prompt_lens=jnp.zeros(shape.batch, jnp.int32),
    )
    q = jax.random.normal(jax.random.key(2), (shape.batch, shape.num_heads, H), jnp.bfloat16)
    given = Sequences(q, kv, region)
    if kv.carry is None:
        return given
    carry = jax.jit(functools.partial(numbers, policy))(given)[None]  # else the first steps would read nothing
    return dataclasses.replace(given, kv=dataclasses.replace(kv, carry=carry))


def attend(policy: Policy, q: Array, kv: KVCache, region: AttentionBatch) -> tuple[Array, KVCache]:
    """Selection, planning and attention of one layer."""
    attention = functools.partial(paged_attention, scale=H**-0.5, return_lse=True)
    (out, _), kv = attend_decode(policy, q, kv, jnp.int32(0), region, lambda q, batch: attention(q, kv, 0, batch))
    return out, kv


def sparse_s(shape: shapes.Decode, policy: Policy, *, calls: int = CALLS) -> float:
    """Seconds of a layer, mean over steps."""
    given = sequences(shape, policy)
    phase = jnp.arange(shape.batch, dtype=jnp.int32)

    @jax.jit
    def run(q: Array, kv: KVCache, region: AttentionBatch, carry: Array | None) -> Array:
        def step(i: Array, state: tuple) -> tuple:
            q, carry = state
            lens = region.kv_lens - PHASES + (i + phase) % PHASES  # another in each step, so that nothing is kept
            now = dataclasses.replace(kv, carry=carry)
            out, now = attend(policy, q, now, dataclasses.replace(region, kv_lens=lens))
            return out, now.carry

        return jax.lax.fori_loop(0, calls, step, (q, carry), unroll=PHASES)[0]  # outputs are queries

    kv = dataclasses.replace(given.kv, carry=None)
    return timed(lambda: run(given.q, kv, given.region, given.kv.carry), jax.block_until_ready) / calls


def numbers(policy: Policy, given: Sequences) -> Array:
    """Of the pages that the policy selects."""
    region = given.region
    return select_pages(policy, given.q, given.kv, jnp.int32(0), region.page_table, region.kv_lens)


def tables(policy: Policy, given: Sequences) -> AttentionBatch:
    region, kv = given.region, given.kv
    return tables_of(numbers(policy, given), region.page_table, region.kv_lens, kv.page_size, kv.k.shape[1])


def selected_s(shape: shapes.Decode, policy: Policy, *, calls: int = CALLS) -> float:
    """Seconds of attention alone, to pages selected and planned before."""
    given = sequences(shape, policy)
    batch = jax.jit(functools.partial(tables, policy))(given)
    return attention_s(given.q, given.kv, batch, calls=calls, implementation=None)


def dense_s(shape: shapes.Decode, *, calls: int = CALLS) -> float:
    kv, table = cache(np.full(shape.batch, shape.context), shape.num_kv_heads, shape.page_size)
    q = jax.random.normal(jax.random.key(2), (shape.batch, shape.num_heads, H), jnp.bfloat16)
    batch = AttentionBatch(page_table=table, kv_lens=jnp.full(shape.batch, shape.context, jnp.int32))
    return attention_s(q, kv, batch, calls=calls, implementation=None)


def error_row(shape: shapes.Decode) -> Row:
    """All pages are selected, so both do the same."""
    policy = Quest(budget=shape.context)
    given = sequences(shape, policy)
    out, _ = jax.jit(functools.partial(attend, policy))(given.q, given.kv, given.region)
    dense = jax.jit(functools.partial(paged_attention, scale=H**-0.5))(given.q, given.kv, 0, given.region)
    out, dense = (np.asarray(x, np.float32) for x in (out, dense))
    error = float(np.abs(out - dense).max() / np.abs(dense).max())
    return Row(name="sparse_error", value=error, unit="", target=0.02, lower_is_better=True)


def shape_rows(shape: shapes.Decode, goals: tuple[float, float], *, calls: int = CALLS) -> Iterator[Callable[[], Row]]:
    """What gives each row of one shape."""
    label, page_size = f"{shape.batch}x{shape.context}", shape.page_size
    budget = max(3 * page_size, shape.context // 10)
    dense = functools.cache(lambda: dense_s(shape, calls=calls))
    peer = functools.cache(lambda: flashinfer_s(shape))
    for name, policy in policies(budget).items():
        seconds = functools.cache(functools.partial(sparse_s, shape, policy, calls=calls))

        def row(other: Callable[[], float], suffix: str = "", name=name, seconds=seconds) -> Row:
            return Row(
                name=f"sparse_{name}_{label}{suffix}",
                value=1e6 * seconds(),
                unit="us",
                peer=1e6 * other(),
                target=goals[0],
                stretch=goals[1],
                lower_is_better=True,
            )

        def selection(name=name, policy=policy, seconds=seconds) -> Row:
            share = (seconds() - selected_s(shape, policy, calls=calls)) / dense()
            name = f"sparse_{name}_{label}_selection"
            return Row(name=name, value=share, unit="", target=SELECTION_MUST, lower_is_better=True)

        yield functools.partial(row, dense)
        if flashinfer is not None:
            yield functools.partial(row, peer, "_flashinfer")
        yield selection


def break_even_row(
    name: str, policy: Policy, shape: shapes.Decode, contexts: tuple[int, ...], *, calls: int = CALLS
) -> Row:
    ratios = []
    for context in contexts:
        here = dataclasses.replace(shape, context=context)
        ratios.append(dense_s(here, calls=calls) / sparse_s(here, policy, calls=calls))
        print(f"{name} at {context}: {ratios[-1]:.3f} times as fast as dense", flush=True)
    return Row(name=f"sparse_{name}_break_even", value=break_even(contexts, ratios), unit="tokens")


def break_even(contexts: tuple[int, ...], ratios: list[float]) -> float:
    """The context from which on the ratio stays above 1, between those measured on a scale of logarithms; the first if
    it always is, infinity if the last is not.
    """
    behind = [i for i, ratio in enumerate(ratios) if ratio < 1]
    if not behind:
        return float(contexts[0])
    i = behind[-1]
    if i + 1 == len(contexts):
        return math.inf
    part = -math.log(ratios[i]) / math.log(ratios[i + 1] / ratios[i])
    return contexts[i] * (contexts[i + 1] / contexts[i]) ** part


def collect(makers: list[Callable[[], Row]]) -> tuple[list[Row], list[str]]:
    """The rows that could be made, each printed as soon as it is there, and what was wrong with the others."""
    rows, failures = [], []
    for make in makers:
        try:
            rows.append(make())
            print(rows[-1].as_dict(), flush=True)
        except Exception as error:  # whatever it is, the other rows count
            traceback.print_exc()
            failures.append(f"{type(error).__name__}: {str(error)[:200]}")
        jax.clear_caches()
    return rows, failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, help="folder for the rows as sparse.jsonl")
    save = parser.parse_args().save
    first = next(iter(SHAPES))
    makers: list[Callable[[], Row]] = [functools.partial(error_row, dataclasses.replace(first, context=4096))]
    for shape, goals in SHAPES.items():
        makers += shape_rows(shape, goals)
    for name, policy in policies(2048).items():
        makers.append(functools.partial(break_even_row, name, policy, first, CONTEXTS))
    rows, failures = collect(makers)
    report(rows, save=save and save / "sparse.jsonl")
    if failures:
        raise SystemExit("\n".join(["rows that failed:", *failures]))


if __name__ == "__main__":
    main()
