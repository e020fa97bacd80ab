"""The TPU kernel of the experts against the definition, in the TPU's interpreter.

It knows copies, semaphores and memory that nobody has written: copies are made when they start, with a search for
races, or as late as a wait allows.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels import tpu
from jaxserve.pallas_kernels.grouped_matmul import fused_moe, mosaic_tpu, mosaic_tpu_kernel, reference

LAYERS, LAYER = 2, 1
INTERPRETERS = {
    mode: pltpu.InterpretParams(detect_races=True, vector_clock_size=64, dma_execution_mode=mode)
    for mode in ("eager", "on_wait")
}
CHIPS = {
    "v5e": pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V5E, 1),
    "v5p": pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V5P, 2),
    "v6e": pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V6E, 1),
    "7x": pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_7X, 1),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    tokens: int
    experts: int = 8
    top_k: int = 3
    D: int = 256
    F: int = 128
    normalize: bool = True
    skew: float = 0.0  # added to the logits of the first experts
    blocks: bool = False  # of an expert, in a small memory; with a small matrix unit, so that a tile has several passes


CASES = {
    "one_token": Case(tokens=1, experts=4, top_k=2),
    "few_tokens": Case(tokens=5, normalize=False),
    "several_tiles_of_an_expert": Case(tokens=20, top_k=2, skew=9.0),
    "several_blocks": Case(tokens=21, experts=4, top_k=2, F=256, skew=9.0, blocks=True),
    "every_expert": Case(tokens=4, experts=4, top_k=4, D=512),
    "padded_words": Case(tokens=6, D=768, F=384),
}
FAST_CASES = ("several_tiles_of_an_expert", "several_blocks")


@pytest.fixture(autouse=True)
def chip(monkeypatch):
    monkeypatch.setattr(tpu, "chip", lambda: CHIPS["v6e"])


def chip_of(case: Case) -> pltpu.TpuInfo:
    small = {"vmem_capacity_bytes": 3 << 19, "mxu_column_size": 16}
    return dataclasses.replace(CHIPS["v6e"], **small if case.blocks else {})


def slow(*values):
    return [pytest.param(value, marks=pytest.mark.full) for value in values]


def inputs(case: Case) -> tuple[Array, Array, Array, Array]:
    """Weights of other layers, and of experts that no token picks, are not numbers."""
    rng = np.random.default_rng(case.tokens)
    x = rng.standard_normal((case.tokens, case.D))
    logits = rng.standard_normal((case.tokens, case.experts))
    logits[:, : case.top_k] += case.skew
    unused = np.setdiff1d(np.arange(case.experts), chosen(logits, case))
    stacks = []
    for out, depth in ((2 * case.F, case.D), (case.D, case.F)):
        stack = rng.standard_normal((LAYERS, case.experts, out, depth)) / depth**0.5
        stack[1 - LAYER], stack[:, unused] = np.nan, np.nan
        stacks.append(jnp.asarray(stack, jnp.bfloat16))
    gate_up, down = stacks
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(logits, jnp.float32), gate_up, down


def chosen(logits, case: Case) -> np.ndarray:
    return np.argsort(-np.asarray(logits), axis=1)[:, : case.top_k]


def run(x, logits, gate_up, down, case: Case, mode="eager", layer=LAYER, **options) -> tuple[np.ndarray, int]:
    call = functools.partial(
        mosaic_tpu.fused_moe, top_k=case.top_k, normalize=case.normalize, interpret=INTERPRETERS[mode]
    )
    out, picked = jax.jit(call)(x, logits, gate_up, down, jnp.int32(layer), **options)
    return np.asarray(out, np.float32), int(picked)


def error(got, expected, case: Case) -> float:
    """The largest error in units of its bound: epsilon x sqrt(length of the sums) x the output's scale."""
    bound = float(jnp.finfo(jnp.bfloat16).eps) * np.sqrt(case.D + case.F) / 4 * np.abs(expected).max()
    return float(np.abs(got - expected).max() / bound)


def definition(x, logits, gate_up, down, case: Case) -> np.ndarray:
    return reference.fused_moe(x, logits, gate_up, down, LAYER, top_k=case.top_k, normalize=case.normalize)


@pytest.mark.parametrize("mode", INTERPRETERS)
@pytest.mark.parametrize("name", [*FAST_CASES, *slow(*(name for name in CASES if name not in FAST_CASES))])
def test_agrees_with_the_definition_and_reads_no_other_weights(name, mode, monkeypatch):
    case = CASES[name]
    monkeypatch.setattr(tpu, "chip", lambda: chip_of(case))
    args = inputs(case)
    got, picked = run(*args, case, mode)
    assert error(got, definition(*args, case), case) < 1
    assert picked == len(np.unique(chosen(args[1], case)))


def test_the_cases_have_several_tiles_and_blocks():
    def sizes(case: Case):
        return mosaic_tpu.tiling(case.tokens, case.top_k, case.experts, case.D, case.F, chip_of(case))

    case = CASES["several_tiles_of_an_expert"]
    assert np.bincount(chosen(inputs(case)[1], case).reshape(-1)).max() > sizes(case).rows
    case = CASES["several_blocks"]
    assert np.bincount(chosen(inputs(case)[1], case).reshape(-1)).max() > sizes(case).pass_rows
    assert sizes(case).columns < case.F
    assert sizes(case).rows > sizes(case).pass_rows


@pytest.mark.parametrize("wrong", ["expert", "row", *slow("tile", "zeros", "other layer", "up before gate", "shares")])
def test_a_plausible_wrong_answer_is_out_of_bounds(wrong, monkeypatch):
    case = CASES["every_expert"]
    x, logits, gate_up, down = inputs(case)
    gate_up, down = (jnp.where(jnp.isnan(w), w[LAYER, ::-1][None], w) for w in (gate_up, down))
    expected = definition(x, logits, gate_up, down, case)
    spoils = {
        "expert": lambda s: s._replace(experts=jnp.roll(s.experts, 1)),
        "row": lambda s: s._replace(tokens=jnp.roll(s.tokens, 1)),
        "tile": lambda s: s._replace(num_rows=s.num_rows.at[1].set(0)),  # what nobody computes is not a number
    }
    if wrong in spoils:
        scalars_of = mosaic_tpu.scalars_of
        monkeypatch.setattr(mosaic_tpu, "scalars_of", lambda *args, **kw: spoils[wrong](scalars_of(*args, **kw)))
        got, _ = run(x, logits, gate_up, down, case)
    elif wrong == "zeros":
        got = np.zeros_like(expected)
    elif wrong == "other layer":
        got, _ = run(x, logits, gate_up, down, case, layer=1 - LAYER)
    elif wrong == "up before gate":
        got, _ = run(x, logits, jnp.roll(gate_up, case.F, axis=2), down, case)
    else:
        got, _ = run(x, 0 * logits, gate_up, down, case)
    assert not error(got, expected, case) < 1


def test_a_missing_wait_is_found_by_either_interpreter(monkeypatch):
    case = CASES["one_token"]
    args = inputs(case)
    monkeypatch.setattr(mosaic_tpu_kernel, "wait", lambda copy: None)
    if jax.__version_info__ >= (0, 12):  # before, a race is printed only
        with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
            run(*args, case, "eager")
    pltpu.reset_tpu_interpret_mode_state()
    got, _ = run(*args, case, "on_wait")
    pltpu.reset_tpu_interpret_mode_state()
    assert not error(got, definition(*args, case), case) < 1


@pytest.mark.parametrize("mode", ["on_wait", *slow("eager")])
def test_padding_picks_no_expert_and_changes_no_real_token(mode):
    case = Case(tokens=9, top_k=2)
    real = np.array([True, False, True, True, False, True, False, False, False])
    x, logits, gate_up, down = inputs(case)
    picked = np.unique(chosen(logits, case)[real])
    unpicked = np.setdiff1d(np.arange(case.experts), picked)
    assert unpicked.size >= 1
    logits = jnp.where(real[:, None], logits, 9.0 * np.isin(np.arange(case.experts), unpicked))
    gate_up, down = (jnp.nan_to_num(stack, nan=0.1) for stack in (gate_up, down))
    everyone, _ = run(x, logits, gate_up, down, case, mode)
    gate_up, down = (stack.at[:, unpicked].set(jnp.nan) for stack in (gate_up, down))
    x = jnp.where(real[:, None], x, jnp.nan)
    got, num_picked = run(x, logits, gate_up, down, case, mode, real=jnp.asarray(real))
    np.testing.assert_array_equal(got[real], everyone[real])
    assert not got[~real].any()
    assert num_picked == picked.size


def test_padding_alone_reads_no_weights():
    case = CASES["few_tokens"]
    x, logits, *stacks = inputs(case)
    gate_up, down = (jnp.full_like(stack, jnp.nan) for stack in stacks)
    got, picked = run(x, logits, gate_up, down, case, "on_wait", real=jnp.zeros(case.tokens, bool))
    assert not got.any()
    assert picked == 0


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # the interpreter's arithmetic is NumPy's
def test_what_is_not_a_number_in_one_token_harms_no_other():
    case = CASES["few_tokens"]
    x, logits, *stacks = inputs(case)
    gate_up, down = (jnp.nan_to_num(stack) for stack in stacks)
    expected, _ = run(x, logits, gate_up, down, case)
    got, _ = run(x.at[2, 7].set(jnp.nan), logits.at[1].set(jnp.nan), gate_up, down, case)
    assert np.isnan(got[2]).any()
    assert not got[1].any()
    np.testing.assert_array_equal(np.delete(got, [1, 2], axis=0), np.delete(expected, [1, 2], axis=0))


def test_parts_of_the_experts_add_up():
    """As on a mesh, where each device has some of them, and a last one may have zeros behind its own."""
    case = CASES["few_tokens"]
    x, logits, gate_up, down = inputs(case)
    size, parts, picked = 3 * case.experts // 4, [], 0
    for first in (0, size):
        here = [
            jnp.pad(w, [(0, 0), (0, 2 * size - case.experts), (0, 0), (0, 0)])[:, first:][:, :size]
            for w in (gate_up, down)
        ]
        part, num_picked = run(x, logits, here[0], here[1], case, "on_wait", first_expert=jnp.int32(first))
        parts.append(part)
        picked += num_picked
    expected = definition(x, logits, gate_up, down, case)
    assert error(parts[0] + parts[1], expected, case) < 2  # two are rounded
    assert error(parts[0], expected, case) > 2
    assert picked == len(np.unique(chosen(logits, case)))


SHAPES = {  # experts, choices, D, F
    "qwen3_30b_a3b": (128, 8, 2048, 768),
    "qwen3_235b_a22b": (128, 8, 4096, 1536),
    "mixtral_8x7b": (8, 2, 4096, 14336),
    "deepseek_v3": (256, 8, 7168, 2048),
}


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", SHAPES)
def test_tilings_fit_the_vector_memory_of_each_generation(chip, name):
    E, top_k, D, F = SHAPES[name]
    for tokens in (1, 64, 256, 8192):
        sizes = mosaic_tpu.tiling(tokens, top_k, E, D, F, CHIPS[chip])
        assert F % sizes.columns == 0
        assert sizes.rows % sizes.pass_rows == sizes.pass_rows % 16 == 0
        assert mosaic_tpu.vmem_bytes(sizes, D, F) <= sizes.vmem_bytes < CHIPS[chip].vmem_capacity_bytes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": jnp.float32}, "rows and weights must be bfloat16, got float32, float32, float32"),
        ({"act": "gelu_tanh"}, "the activation must be silu, got gelu_tanh"),
        ({"D": 128}, "must be a multiple of 256 and the experts' of 128, got 128 and 128"),
        ({"F": 64}, "must be a multiple of 256 and the experts' of 128, got 256 and 64"),
        ({"tokens": 2**16}, "a step may have 131072 choices of experts, got 196608"),
    ],
)
def test_what_it_cannot_serve_it_says(changes, reason):
    tokens, D, F = (changes.get(name, size) for name, size in (("tokens", 3), ("D", 256), ("F", 128)))
    args = ((tokens, D), (tokens, 4), (1, 4, 2 * F, D), (1, 4, D, F))
    x, logits, gate_up, down = (jnp.zeros(shape, changes.get("dtype", jnp.bfloat16)) for shape in args)
    options = {"top_k": 3, "normalize": True, "act": changes.get("act", "silu"), "implementation": "mosaic_tpu"}
    with pytest.raises(NotImplementedError, match=f"fused_moe: .*{reason}"):
        fused_moe(x, logits.astype(jnp.float32), gate_up, down, 0, **options)
    assert "quantised" in (mosaic_tpu.unsupported(x, {"values": gate_up}, down, "silu", 3) or "")


def test_without_kernels_it_says_so():
    x, logits, gate_up, down = inputs(CASES["one_token"])
    with pytest.raises(NotImplementedError, match="kernels for Hopper GPUs and TPUs only, not for 'xla'"):
        fused_moe(x, logits, gate_up, down, 0, top_k=3, normalize=True, implementation="xla")
