"""The experts' kernels against the definition, in Pallas' interpreter where there is no Hopper GPU.

On a GPU, `pytest --noconftest tests/pallas_kernels` runs the same tests compiled.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.grouped_matmul import (
    fused_moe,
    mosaic_gpu,
    mosaic_gpu_choose,
    mosaic_gpu_matmul,
    mosaic_gpu_permute,
    mosaic_gpu_route,
    reference,
)
from jaxserve.pallas_kernels.grouped_matmul.work import UNIT, max_rows, max_tiles, picks_of, plan

ON_GPU = jax.devices()[0].platform == "gpu"
LAYERS, LAYER = 2, 1

interpreted = pytest.mark.skipif(
    not ON_GPU and jax.__version_info__ < (0, 12), reason="before jax 0.12 the interpreter loses wgmma accumulators"
)


def slow(*values):
    """Parameters of a test that takes seconds where it is interpreted, and is left to the full check."""
    return [pytest.param(value, marks=[] if ON_GPU else [pytest.mark.full]) for value in values]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    tokens: int
    experts: int = 8
    top_k: int = 3
    D: int = 256
    F: int = 64
    normalize: bool = True
    skew: float = 0.0  # added to the logits of the first experts
    dtype: str = "bfloat16"


CASES = {
    "one_token": Case(tokens=1),
    "few_tokens": Case(tokens=5, normalize=False),
    "float16": Case(tokens=3, dtype="float16"),
    "one_choice": Case(tokens=7, top_k=1),
    "every_expert": Case(tokens=4, experts=4, top_k=4),
    "wide": Case(tokens=6, F=384, D=128),
    "routed_one_token": Case(tokens=1, experts=128, top_k=8, D=128),
    "routed_few_tokens": Case(tokens=6, experts=64, top_k=4, D=128, normalize=False, skew=2.0),
    "routed_by_blocks": Case(tokens=100, experts=64, top_k=2, D=128),
    "more_rows_than_a_tile": Case(tokens=150, experts=6, top_k=1, skew=8.0),
    "many_rows": Case(tokens=170, experts=4, top_k=2),
    "many_rows_skewed": Case(tokens=140, experts=4, top_k=2, D=128, skew=8.0),
}
FAST_CASES = ("few_tokens", "routed_few_tokens", "many_rows_skewed")


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """Three interpreted multiprocessors, so that each has several units, and an error where accesses are unordered."""
    if not ON_GPU:
        monkeypatch.setattr(mosaic_gpu, "num_multiprocessors", lambda: 3)
        for module in (mosaic_gpu_choose, mosaic_gpu_matmul, mosaic_gpu_permute, mosaic_gpu_route):
            monkeypatch.setattr(module, "INTERPRETER", plgpu.InterpretGPUParams(detect_races=True))


def inputs(case: Case):
    """Weights of other layers, and of experts that no token picks, are not numbers."""
    rng = np.random.default_rng(case.tokens)
    x = rng.standard_normal((case.tokens, case.D))
    logits = rng.standard_normal((case.tokens, case.experts))
    logits[:, : case.top_k] += case.skew
    chosen = np.argsort(-logits, axis=1)[:, : case.top_k]
    unused = np.setdiff1d(np.arange(case.experts), chosen)
    stacks = []
    for out, depth in ((2 * case.F, case.D), (case.D, case.F)):
        stack = rng.standard_normal((LAYERS, case.experts, out, depth)) / depth**0.5
        stack[1 - LAYER], stack[:, unused] = np.nan, np.nan
        stacks.append(jnp.asarray(stack, case.dtype))
    return jnp.asarray(x, case.dtype), jnp.asarray(logits, jnp.float32), *stacks


def run(*args, **options):
    return run_and_count(*args, **options)[0]


def run_and_count(x, logits, gate_up, down, case: Case, layer=LAYER, real=None):
    real = None if real is None else jnp.asarray(real)
    options = {"top_k": case.top_k, "normalize": case.normalize, "real": real}
    if ON_GPU:
        return fused_moe(x, logits, gate_up, down, layer, **options)
    return mosaic_gpu.fused_moe(x, logits, gate_up, down, layer, **options, interpret=True)


def error(got, expected, case: Case) -> float:
    """The largest error in units of its bound: epsilon x sqrt(length of the sums) x the output's scale."""
    bound = float(jnp.finfo(case.dtype).eps) * np.sqrt(case.D + case.F) / 4 * np.abs(expected).max()
    return float(np.abs(np.asarray(got, np.float32) - expected).max() / bound)


@interpreted
@pytest.mark.parametrize("name", [*FAST_CASES, *slow(*(name for name in CASES if name not in FAST_CASES))])
def test_agrees_with_the_definition_and_reads_no_other_weights(name):
    case = CASES[name]
    args = inputs(case)
    expected = reference.fused_moe(*args, LAYER, top_k=case.top_k, normalize=case.normalize)
    got, num_experts = run_and_count(*args, case)
    assert num_experts == np.unique(np.argsort(-np.asarray(args[1]), axis=1)[:, : case.top_k]).size
    assert got.dtype == case.dtype
    assert error(got, expected, case) < 1


@interpreted
@pytest.mark.parametrize("wrong", ["zeros", "next expert", *slow("other layer", "up before gate", "other shares")])
def test_a_plausible_wrong_answer_is_out_of_bounds(wrong):
    case = CASES["every_expert"]
    x, logits, gate_up, down = inputs(case)
    gate_up, down = (jnp.where(jnp.isnan(w), w[LAYER, ::-1][None], w) for w in (gate_up, down))
    expected = reference.fused_moe(x, logits, gate_up, down, LAYER, top_k=4, normalize=True)
    if wrong == "zeros":
        got = jnp.zeros_like(x)
    elif wrong == "other layer":
        got = run(x, logits, gate_up, down, case, layer=1 - LAYER)
    elif wrong == "up before gate":
        got = run(x, logits, jnp.roll(gate_up, case.F, axis=2), down, case)
    elif wrong == "other shares":
        got = run(x, 0 * logits, gate_up, down, case)
    else:
        got = run(x, logits, gate_up, jnp.roll(down, 1, axis=1), case)
    assert error(got, expected, case) > 1


INTERPRET = {} if ON_GPU else {"interpret": True}


def rows_of(picks, num_pairs: int, tile_rows: int):
    """The tiles, and the row of each pick, `[top_k, tokens]`, if all tokens are of the first block."""
    work, first_row = plan(picks, num_pairs, tile_rows)
    places = np.asarray(first_row)[0][np.asarray(picks.expert)] + np.asarray(picks.rank)
    return work, np.where(np.asarray(picks.rank) < 0, max_rows(num_pairs, first_row.shape[1]) - 1, places)


def some_real(num_tokens: int):
    """Three tokens of four are real, and none of the last five."""
    row = np.arange(num_tokens)
    return (row % 4 != 1) & (row < num_tokens - 5)


def hard_logits(num_tokens: int):
    """Many are equal, of which the first ones count, and some are no choice."""
    rng = np.random.default_rng(num_tokens)
    logits = rng.integers(-9, 9, (num_tokens, 128)) / 2
    logits[3, ::2] = -np.inf
    return jnp.asarray(logits, jnp.float32)


@interpreted
@interpreted
@pytest.mark.parametrize("name", ["few_tokens", *slow("routed_few_tokens", "many_rows")])
def test_parts_of_the_experts_add_up(name):
    """As on a mesh, where each device has some of them, and a last one may have zeros behind its own."""
    case = CASES[name]
    x, logits, gate_up, down = inputs(case)
    expected = reference.fused_moe(x, logits, gate_up, down, LAYER, top_k=case.top_k, normalize=case.normalize)
    size, parts, picked = 3 * case.experts // 4, [], 0
    options = {"top_k": case.top_k, "normalize": case.normalize}
    for first in (0, size):
        here = [
            jnp.pad(w, [(0, 0), (0, 2 * size - case.experts), (0, 0), (0, 0)])[:, first:][:, :size]
            for w in (gate_up, down)
        ]
        call = fused_moe if ON_GPU else functools.partial(mosaic_gpu.fused_moe, interpret=True)
        part, num_picked = call(x, logits, *here, LAYER, first_expert=first, **options)
        parts.append(np.asarray(part, np.float32))
        picked += int(num_picked)
    assert error(parts[0] + parts[1], expected, case) < 2  # two are rounded
    assert error(parts[0], expected, case) > 2
    assert picked == run_and_count(x, logits, gate_up, down, case)[1]


@pytest.mark.parametrize("normalize", [True, *slow(False)])
def test_routing_in_one_kernel_gives_what_xla_gives(normalize):
    real = some_real(9) if normalize else np.ones(9, bool)
    x, logits = jax.random.normal(jax.random.key(0), (9, 128), jnp.bfloat16), hard_logits(9)
    up, _ = mosaic_gpu.tilings(9, 8, 128, 128, 64)
    gate_up = jnp.zeros((1, 128, 128, 128), x.dtype)
    rows, work, places, weights = mosaic_gpu_route.route_and_permute(
        x, logits, jnp.asarray(real), gate_up, 0, 8, up, normalize=normalize, **INTERPRET
    )
    picks, expected_weights = mosaic_gpu.route(logits, jnp.asarray(real), 8, normalize)
    expected, expected_places = rows_of(picks, 72, 64)
    num_tiles = int(expected.num_tiles[0])
    assert int(jnp.sum(expected.num_rows[:num_tiles])) == 8 * real.sum()
    assert int(work.num_tiles[0]) == num_tiles
    for field in ("expert", "row", "num_rows"):
        np.testing.assert_array_equal(getattr(work, field)[:num_tiles], getattr(expected, field)[:num_tiles])
    np.testing.assert_array_equal(places, expected_places)
    np.testing.assert_allclose(weights, expected_weights, rtol=1e-5)
    np.testing.assert_array_equal(rows[places[:, real]], jnp.broadcast_to(x[real], (8, *x[real].shape)))


@interpreted
@pytest.mark.parametrize("num_tokens", [70, *slow(64, 131)])
def test_choices_by_blocks_lead_to_the_same_rows(num_tokens):
    normalize = num_tokens == 64
    real = np.ones(num_tokens, bool) if normalize else some_real(num_tokens)
    x, logits = jax.random.normal(jax.random.key(0), (num_tokens, 128), jnp.bfloat16), hard_logits(num_tokens)
    picks, weights = mosaic_gpu_choose.choose(logits, jnp.asarray(real), 8, normalize=normalize, **INTERPRET)
    whole, expected_weights = mosaic_gpu.route(logits, jnp.asarray(real), 8, normalize)
    expected, expected_places = rows_of(whole, 8 * num_tokens, 64)
    work, first_row = plan(picks, 8 * num_tokens, 64)
    jax.tree.map(np.testing.assert_array_equal, work, expected)
    rows, places, weights = mosaic_gpu_permute.permute(
        x, picks, weights, first_row, max_rows(8 * num_tokens, 128), **INTERPRET
    )
    np.testing.assert_array_equal(places, expected_places)
    np.testing.assert_allclose(weights, expected_weights, rtol=1e-5)
    np.testing.assert_array_equal(rows[places[:, real]], jnp.broadcast_to(x[real], (8, *x[real].shape)))


PADDED = {  # by each way to make the choices
    "route": Case(tokens=9, experts=64, top_k=2, D=128),
    "choose": Case(tokens=70, experts=64, top_k=2, D=128, normalize=False),
    "xla": Case(tokens=9, experts=8, top_k=2, D=128),
}


@interpreted
@pytest.mark.parametrize("name", ["route", *slow("choose", "xla")])
def test_padding_picks_no_expert_and_changes_no_real_token(name):
    case = PADDED[name]
    real = some_real(case.tokens)
    x, logits, *stacks = inputs(case)
    picked = np.unique(np.argsort(-np.asarray(logits), axis=1)[real, : case.top_k])
    unpicked = np.setdiff1d(np.arange(case.experts), picked)
    logits = jnp.where(real[:, None], logits, 9.0 * np.isin(np.arange(case.experts), unpicked[: case.top_k]))
    clean = [jnp.nan_to_num(stack, nan=0.1) for stack in stacks]
    everyone = np.asarray(run(x, logits, *clean, case), np.float32)
    poisoned = [stack.at[:, unpicked].set(jnp.nan) for stack in clean]
    got = np.asarray(run(jnp.where(real[:, None], x, jnp.nan), logits, *poisoned, case, real=real), np.float32)
    np.testing.assert_array_equal(got[real], everyone[real])
    assert not got[~real].any()
    assert everyone.any(axis=1).all()  # with experts, no row would be zero


@interpreted
@pytest.mark.parametrize("name", ["route", "choose", *slow("xla")])
def test_padding_alone_reads_no_weights(name):
    case = PADDED[name]
    x, logits, *stacks = inputs(case)
    nothing = [jnp.full_like(stack, jnp.nan) for stack in stacks]
    assert not run(x, logits, *nothing, case, real=np.zeros(case.tokens, bool)).any()


NOT_NUMBERS = Case(tokens=3, experts=64, top_k=2, D=128)


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # the interpreter's matmul is NumPy's
@pytest.mark.parametrize("value", [np.nan, *slow(np.inf, -np.inf)])
@pytest.mark.parametrize("case", [NOT_NUMBERS, *slow(dataclasses.replace(NOT_NUMBERS, tokens=70), CASES["few_tokens"])])
def test_what_is_not_a_number_in_one_token_harms_no_other(case, value):
    x, logits, *stacks = inputs(case)
    stacks = [jnp.nan_to_num(stack) for stack in stacks]
    expected = np.asarray(run(x, logits, *stacks, case), np.float32)
    got = np.asarray(run(x.at[2, 7].set(value), logits.at[1].set(value), *stacks, case), np.float32)
    assert not np.isfinite(got[2]).all()
    assert np.isinf(value) or not got[1].any()
    np.testing.assert_array_equal(np.delete(got, [1, 2], axis=0), np.delete(expected, [1, 2], axis=0))


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 8, 3), (7, 8, 2), (40, 128, 8), (300, 16, 8), (700, 5, 2)]
)
@pytest.mark.parametrize("tile_rows", [64, 128])
def test_a_plan_gives_every_pair_a_row_of_its_own_in_one_tile_of_its_expert(tokens, experts, top_k, tile_rows):
    rng = np.random.default_rng(tokens)
    scores = rng.standard_normal((tokens, experts)) + np.linspace(0, 3, experts)
    chosen = np.argsort(-scores, axis=1)[:, :top_k]
    work, places = rows_of(picks_of(jnp.asarray(chosen, jnp.int32), experts), tokens * top_k, tile_rows)
    num_tiles = int(work.num_tiles[0])
    assert num_tiles <= work.expert.shape[0] == max_tiles(tokens * top_k, experts, tile_rows)
    owner: dict[int, int] = {}  # expert by row
    units: list[int] = []
    for expert, row, num_rows in zip(
        *(np.asarray(f)[:num_tiles] for f in (work.expert, work.row, work.num_rows)), strict=True
    ):
        assert 0 < num_rows <= tile_rows
        rows = range(row * UNIT, row * UNIT + num_rows)
        assert rows.start + max(8, 1 << (len(rows) - 1).bit_length()) <= max_rows(tokens * top_k, experts)
        owner |= dict.fromkeys(rows, int(expert))
        units += range(row, row + -(-num_rows // UNIT))
    assert len(units) == len(set(units))  # what a tile stores in whole units is no one else's
    flat = places.T.reshape(-1)
    assert sorted(flat) == sorted(owner)
    assert [owner[p] for p in flat] == list(chosen.reshape(-1))


@pytest.mark.parametrize(
    ("changes", "act", "reason"),
    [
        ({"dtype": "float32"}, "silu", "must all be bfloat16 or all float16, got float32, float32, float32"),
        ({}, "gelu_tanh", "the activation must be silu, got gelu_tanh"),
        ({"D": 96}, "silu", "must be a multiple of 128 and the experts' of 64, got 96 and 64"),
        ({"F": 48}, "silu", "must be a multiple of 128 and the experts' of 64, got 256 and 48"),
    ],
)
def test_what_it_cannot_serve_it_says(changes, act, reason):
    case = dataclasses.replace(CASES["one_token"], **changes)
    x, logits, gate_up, down = inputs(case)
    with pytest.raises(NotImplementedError, match=f"fused_moe: .*{reason}"):
        fused_moe(x, logits, gate_up, down, LAYER, top_k=3, normalize=True, act=act, implementation="mosaic_gpu")
    x, logits, gate_up, down = inputs(CASES["one_token"])
    assert mosaic_gpu.unsupported(x, gate_up, down, "silu") is None
    assert "quantised" in (mosaic_gpu.unsupported(x, {"values": gate_up}, down, "silu") or "")
