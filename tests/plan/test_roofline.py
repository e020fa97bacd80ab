"""Predicted times: beside measured ones, by hand where it can be done by hand, and never the wrong way round."""

import dataclasses
import functools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from benchmarks import plan as benchmark
from jaxserve.config import DeviceMemory, EngineConfig
from jaxserve.models import get_model
from jaxserve.plan.memory import memory_of
from jaxserve.plan.roofline import (
    MEASURED,
    STEP_S,
    TPU_KERNEL_S,
    Rank,
    decode_step,
    most_experts,
    own_tokens,
    prefill_s,
)
from jaxserve.plan.splits import rank_of
from jaxserve.scheduler.pages import PagePool
from jaxserve.topologies import TOPOLOGIES, find_topology
from jaxserve.weights.dummy import SHAPES

MISTRAL = SHAPES["llama-3.1-8b"] | {"architectures": ["MistralForCausalLM"], "sliding_window": 4096}
MISTRAL = {name: value for name, value in MISTRAL.items() if name != "rope_scaling"}
CONFIGS = SHAPES | {"mistral": MISTRAL}


@functools.cache
def rank(name: str, kv: int = 1, tp: int = 1, topology: str = "h200", kv_cache_dtype: str = "auto") -> Rank:
    sizes = {"kv_parallel_size": kv, "tensor_parallel_size": tp}
    config = EngineConfig.of(name, kv_cache_dtype=kv_cache_dtype, **sizes)
    model = get_model(CONFIGS[name])
    memory = memory_of(config, model, DeviceMemory(platform="gpu", limit_bytes=2**40))
    return rank_of(model, memory, find_topology(topology), kv, tp)


def decode_ms(of: Rank, batch: int, context: int) -> float:
    return 1e3 * decode_step(of, batch=batch, context=context, num_rows=max(8, batch)).total_s


# Beside what was measured


def test_rows_that_nothing_was_fitted_to_are_predicted():
    errors = benchmark.errors()
    assert len(errors) >= 6
    assert not set(errors) & set(benchmark.FITTED)
    assert {name: error for name, error in errors.items() if abs(error) > benchmark.MAX_ERROR} == {}


def test_the_page_says_how_far_off_predictions_are():
    page = " ".join((Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8").split())
    assert f"it is at most {benchmark.MAX_ERROR:.0f} % off" in page


def test_the_constants_are_those_of_the_rows_that_are_there():
    assert benchmark.fit() == pytest.approx(MEASURED, rel=5e-3)


def test_a_fit_finds_the_constants_that_rows_were_made_with(monkeypatch):
    true = MEASURED._replace(bandwidth_share=0.7, compute_share=0.5, kernel_s=5e-6)
    rows = {name: benchmark.predict(case, true) for name, case in benchmark.cases().items()}
    monkeypatch.setattr(benchmark, "measured", lambda: rows)
    assert benchmark.fit() == pytest.approx(true, rel=1e-3)


@pytest.mark.parametrize("wrong", [{"kernel_s": 0.0}, {"bandwidth_share": 1.2}, {"compute_share": 0.3}], ids=str)
def test_a_model_without_a_part_of_the_work_is_noticed(monkeypatch, wrong):
    """The bound has teeth."""
    predict = functools.partial(benchmark.predict, rates=MEASURED._replace(**wrong))
    monkeypatch.setattr(benchmark, "predict", predict)
    assert max(map(abs, benchmark.errors().values())) > benchmark.MAX_ERROR


def test_written_predictions_name_the_rows_that_will_judge_them(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "PREDICTIONS", tmp_path / "plan_predictions.jsonl")
    benchmark.write_predictions()
    row = "tpot_kv2_tp1_8x32000_decode"
    predicted = benchmark.predict(benchmark.mesh_cases()[row])
    monkeypatch.setattr(benchmark, "measured", lambda: {row: predicted / 1.1})
    assert benchmark.judged() == {"mesh_plan_kv2_tp1_8x32000": pytest.approx(10.0, abs=0.1)}


def test_predictions_of_two_cards_are_there_to_be_judged():
    lines = benchmark.PREDICTIONS.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 + 2 * 6
    assert all(f'"{name}"' in "".join(lines) for name in benchmark.mesh_cases())


# By hand


def test_one_sequence_reads_the_weights_once():
    parts = decode_step(rank("llama-3.1-8b"), batch=1, context=1, num_rows=8)
    read = 2 * (8_030_261_248 - 128256 * 4096)  # all but the embedding, of which it takes one row
    assert parts.weights_s == pytest.approx(read / (4.8e12 * MEASURED.bandwidth_share), rel=1e-6)


def test_many_rows_are_multiplied_no_faster_than_the_device_can():
    parts = decode_step(rank("llama-3.1-8b"), batch=4096, context=1, num_rows=4096)
    flops = 2 * 4096 * (8_030_261_248 - 128256 * 4096 - 65 * 4096)
    assert parts.weights_s == pytest.approx(flops / (989e12 * MEASURED.compute_share), rel=1e-3)


def test_keys_and_values_are_read_by_the_rank_that_has_them():
    context, token = 12_800, 2 * 32 * 8 * 128 * 2
    rate = 4.8e12 * MEASURED.bandwidth_share

    def attention_s(kv: int, tp: int) -> float:
        return decode_step(rank("llama-3.1-8b", kv, tp), batch=3, context=context, num_rows=8).attention_s

    assert attention_s(1, 1) == pytest.approx(3 * context * token / rate)
    assert attention_s(2, 1) == attention_s(1, 2) == pytest.approx(attention_s(1, 1) / 2)
    assert attention_s(1, 16) == attention_s(1, 8)  # copies of the 8 heads are read twice
    assert attention_s(2, 8) == pytest.approx(attention_s(1, 8) / 2)


def test_collectives_of_a_step_are_those_that_it_holds():
    """Two all-reduces a layer, one of the embedding, what greedy rows gather; an exchange a layer over kv."""
    small = decode_step(rank("llama-3.1-8b", 1, 2), batch=1, context=1, num_rows=8).collectives_s
    assert small == pytest.approx(66 * 22e-6, rel=0.02)
    more = decode_step(rank("llama-3.1-8b", 2, 1), batch=1, context=1, num_rows=8).collectives_s
    assert more - small == pytest.approx(32 * 28e-6, rel=0.02)
    assert decode_step(rank("llama-3.1-8b"), batch=1, context=1, num_rows=8).collectives_s == 0.0
    many = decode_step(rank("llama-3.1-8b", 1, 2), batch=8192, context=1, num_rows=8192).collectives_s
    assert many - small == pytest.approx(65 * (8192 - 8) * 4096 * 2 / (450e9 * MEASURED.link_share), rel=1e-6)


def test_a_window_bounds_what_is_read():
    of = rank("mistral")
    assert own_tokens(of, 1, 100_000, "sliding") == 4096
    assert own_tokens(of, 3, 100, "sliding") == 300
    assert own_tokens(of, 1, 100_000, "full") == 100_000
    assert decode_ms(of, 4, 100_000) == decode_ms(of, 4, 4096)


def test_a_window_leaves_no_page_out_where_ranks_share_them():
    of = rank("mistral", kv=2)
    assert own_tokens(of, 1, 128_000, "sliding") == own_tokens(of, 1, 128_000, "full") == 64_000
    assert decode_ms(of, 4, 100_000) > 2 * decode_ms(rank("mistral"), 4, 100_000)
    windowed, without = (
        prefill_s(rank(name, kv=2), num_seqs=1, length=65_536, budget=8192) for name in ("mistral", "llama-3.1-8b")
    )
    assert windowed == without


def test_the_rank_with_most_pages_is_the_one_that_counts():
    of = rank("llama-3.1-8b", kv=4)  # pages of 64
    assert [own_tokens(of, 1, n, "full") for n in (1, 64, 65, 256, 257)] == [1, 64, 64, 64, 128]


@pytest.mark.parametrize(("kv", "pages", "batch", "busiest"), [(8, 1, 256, 32), (4, 5, 64, 80), (8, 9, 64, 72)])
def test_pages_of_a_batch_are_spread_as_the_pool_spreads_them(kv, pages, batch, busiest):
    pool = PagePool(num_pages=kv * 200, page_size=64, num_ranks=kv)
    held = np.zeros(kv, int)
    for _ in range(batch):
        of_sequence = [0] * kv
        assert pool.allocate(pages, of_sequence)
        held += of_sequence
    assert held.max() == busiest
    assert own_tokens(rank("llama-3.1-8b", kv=kv), batch, 64 * pages, "full") == 64 * busiest


def test_heads_that_do_not_suit_the_kernels_take_more_of_them():
    """At one KV head of 128 XLA writes it, in two kernels more; tiles of four queries are padded, and outputs cut."""

    def kernels(name: str, tp: int, topology: str = "h200") -> float:
        parts = decode_step(rank(name, 1, tp, topology), batch=1, context=1, num_rows=8)
        num_layers = rank(name).model.config.num_layers
        return (parts.kernels_s - STEP_S) / num_layers / (MEASURED.kernel_s if topology == "h200" else TPU_KERNEL_S)

    assert kernels("llama-3.1-8b", 8) == pytest.approx(kernels("llama-3.1-8b", 4) + 4)
    assert kernels("qwen3-30b-a3b", 4) == pytest.approx(kernels("qwen3-30b-a3b", 2) + 2)  # tiles of eight
    assert kernels("llama-3.1-8b", 4) == pytest.approx(kernels("llama-3.1-8b", 2))
    assert kernels("llama-3.1-8b", 8, "v5e-8") == pytest.approx(kernels("llama-3.1-8b", 4, "v5e-8"))


def test_experts_read_by_the_busiest_rank():
    rng = np.random.default_rng(0)
    picks = np.argsort(rng.random((4000, 4, 16)), axis=-1)[..., :2]  # 4 tokens, 2 of 16 experts each
    read = np.zeros((4000, 16), bool)
    for token in range(4):
        np.put_along_axis(read, picks[:, token], True, axis=1)
    chance = 1 - (1 - 2 / 16) ** 4
    assert most_experts(16, chance, 1) == pytest.approx(read.sum(1).mean(), rel=0.02)
    for ranks in (2, 4):
        busiest = read.reshape(4000, ranks, -1).sum(-1).max(-1).mean()
        assert most_experts(16 // ranks, chance, ranks) == pytest.approx(busiest, rel=0.05)
    assert most_experts(8, 1.0, 4) == 8


def test_a_mixture_reads_few_experts_for_few_tokens():
    of = rank("qwen3-30b-a3b")
    all_experts = 48 * 128 * 3 * 2048 * 768 * 2
    rate = 4.8e12 * MEASURED.bandwidth_share
    one = decode_step(of, batch=1, context=1, num_rows=8).weights_s
    many = decode_step(of, batch=1024, context=1, num_rows=1024).weights_s
    assert many > all_experts / rate
    assert one < 0.12 * all_experts / rate


def test_float8_pages_are_half_as_much_to_read():
    half, whole = (
        decode_step(rank("llama-3.1-8b", kv_cache_dtype=d), batch=8, context=9999, num_rows=8) for d in ("fp8", "auto")
    )
    assert half.attention_s == pytest.approx(whole.attention_s / 2)
    assert half._replace(attention_s=whole.attention_s) == whole


# Never the wrong way round

BATCHES = st.integers(1, 300)
CONTEXTS = st.integers(1, 100_000)
SPLITS = st.sampled_from([(1, 1), (2, 1), (1, 2), (4, 2), (1, 8)])
MODELS = st.sampled_from(sorted(CONFIGS))


@settings(deadline=None, max_examples=60)
@given(MODELS, SPLITS, BATCHES, CONTEXTS, st.integers(0, 5000), st.integers(0, 300))
def test_more_context_or_more_sequences_never_take_less(name, split, batch, context, more_context, more_batch):
    of = rank(name, *split)
    time = decode_ms(of, batch, context)
    slack = 1 - 1e-9
    assert decode_ms(of, batch, context + more_context) >= time * slack
    assert decode_ms(of, batch + more_batch, context) >= time * slack
    assert 0.0 < time < 1e6


@settings(deadline=None, max_examples=60)
@given(MODELS, SPLITS, BATCHES, CONTEXTS, st.floats(1.0, 10.0))
def test_a_better_device_never_takes_longer(name, split, batch, context, factor):
    of = rank(name, *split)
    for field in ("bandwidth", "flops", "link_bandwidth"):
        better = dataclasses.replace(of.device, **{field: factor * getattr(of.device, field)})
        assert decode_ms(dataclasses.replace(of, device=better), batch, context) <= decode_ms(of, batch, context) * (
            1 + 1e-9
        )


@settings(deadline=None, max_examples=60)
@given(MODELS, BATCHES, CONTEXTS, st.sampled_from(sorted(TOPOLOGIES)))
def test_every_part_of_every_prediction_is_finite(name, batch, context, topology):
    of = dataclasses.replace(rank(name), device=TOPOLOGIES[topology].device)
    parts = decode_step(of, batch=batch, context=context, num_rows=batch)
    assert all(np.isfinite(part) and part >= 0.0 for part in parts)
    assert np.isfinite(prefill_s(of, num_seqs=1, length=context, budget=8192))


@settings(deadline=None, max_examples=60)
@given(MODELS, SPLITS, CONTEXTS, st.integers(0, 5000))
def test_a_longer_prompt_never_takes_less(name, split, length, more):
    of = rank(name, *split)
    times = [prefill_s(of, num_seqs=1, length=n, budget=8192) for n in (length, length + more)]
    assert times[1] >= times[0] * (1 - 1e-9)
