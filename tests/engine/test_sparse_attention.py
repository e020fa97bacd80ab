"""Under sparse attention too, tokens do not depend on how the work was cut, batched, cached, pre-empted or laid out."""

import dataclasses
import json
import re
import shlex
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import DENSE, MODELS, folder_of

from jaxserve import LLM, EngineDeadError, SamplingParams, cli
from jaxserve.config import EngineConfig
from jaxserve.layers.sparse import (
    H2O,
    POLICIES as POLICY_KINDS,
    Blasst,
    CompactAttention,
    DoubleSparsity,
    FlashPrefill,
    Kascade,
    LServe,
    Quest,
    SnapKV,
    SparseAttention,
    StreamingLLM,
)
from jaxserve.scheduler import layered

PAGE = (Path(__file__).parents[2] / "docs" / "sparse_attention.md").read_text(encoding="utf-8")

NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
OPTIONS = {
    "load_format": "dummy",
    "dtype": "float32",
    "max_model_len": 160,
    "page_size": 8,
    "num_pages": 26,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "warm_up": "off",
}
WHOLE = {"max_num_batched_tokens": 128, "enable_prefix_caching": False, "async_scheduling": False}
QUEST = Quest(budget=24, layers=(0, None))  # three pages of eight tokens
ANSWERS = SparseAttention(decode=QUEST)
BOTH = SparseAttention(
    decode=dataclasses.replace(QUEST, layers=(1, None)), prefill=StreamingLLM(sinks=4, window=12, layers=(0, 1))
)
SAME = SparseAttention(decode=QUEST, prefill=QUEST)
SELDOM = SparseAttention(decode=dataclasses.replace(QUEST, reselect=5))
HALVES = LServe(budget=24, sinks=8, local=8, streaming_heads=((0, 2), (1, 0), (1, 1)))
LSERVE = SparseAttention(decode=HALVES)
FLASH = SparseAttention(prefill=FlashPrefill(alpha=0.9, sinks=8, window=8))
COMPACT = SparseAttention(
    decode=FlashPrefill(alpha=1, sinks=0, window=0), prefill=CompactAttention(alpha=1, sinks=0, window=0)
)
FOLLOWS = Kascade(least=24, anchors=(0,), heads=((0, 1, 2), (1, 2, 0)))
FOLLOWING = SparseAttention(decode=FOLLOWS, prefill=FOLLOWS)
SKIP = SparseAttention(
    decode=Blasst(threshold_scale_factor=90.0), prefill=Blasst(threshold_scale_factor=70.0, layers=(1, None))
)
LABELS = SparseAttention(
    decode=DoubleSparsity(budget=24, channels=tuple(tuple((h, 7 - h) for h in range(3)) for _ in range(2)))
)
HEAVY = SparseAttention(decode=H2O(heavy=12, recent=8))
VOTED = SparseAttention(decode=SnapKV(budget=20, window=6, kernel_size=3, layers=(1, None)))
POLICIES = {
    "compact": COMPACT,
    "labels": LABELS,
    "following": FOLLOWING,
    "skip": SKIP,
    "flash": FLASH,
    "lserve": LSERVE,
    "answers": ANSWERS,
    "both": BOTH,
    "same": SAME,
    "seldom": SELDOM,
    "heavy": HEAVY,
    "voted": VOTED,
}
FAST = ("both", "compact", "flash", "seldom", "heavy")
rng = np.random.default_rng(7)
PROMPTS = [rng.integers(3, 300, n).tolist() for n in (100, 71, 80)]
PROMPTS.append(PROMPTS[0][:50] + PROMPTS[1][:20])  # shares a prefix


NAMES = [pytest.param(name, marks=() if name in FAST else pytest.mark.full) for name in POLICIES]


def run(llm, prompts=PROMPTS, params=GREEDY):
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Engines whose metadata, like their pages, are not numbers until they are written."""
    root = tmp_path_factory.mktemp("sparse")
    model, cache = folder_of(DENSE, root / "model"), str(root / "compiled")
    made = []

    def start(sparse, **options):
        made.append(LLM(model, sparse_attention=sparse, **(OPTIONS | {"compilation_cache_dir": cache} | options)))
        device = made[-1].llm_engine.core.runner.device
        device.kv = jax.tree.map(
            lambda x: jnp.full_like(x, jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 2**30, device=x.sharding),
            device.kv,
        )
        return made[-1]

    yield start
    for llm in made:
        llm.close()


@pytest.fixture(scope="module")
def alone(start):
    """Tokens by policies: each prompt by itself, in one piece, without cache or overlap."""
    found = {}

    def of(sparse):
        if sparse not in found:
            llm = start(sparse, **WHOLE)
            found[sparse] = [run(llm, [prompt])[0] for prompt in PROMPTS]
        return found[sparse]

    return of


@pytest.fixture(scope="module")
def crowded(start):
    """Engines by policies, with little room and small steps."""
    found = {}

    def of(sparse):
        if sparse not in found:
            found[sparse] = start(sparse)
        return found[sparse]

    return of


def check(llm, expected):
    assert run(llm) == expected
    assert run(llm) == expected  # a second time: with a filled prefix cache, over pages that others had
    metrics = llm.get_metrics()
    assert metrics["jaxserve:num_preemptions"] > 0
    if llm.llm_engine.core.scheduler.cache.enabled:
        assert metrics["jaxserve:prefix_cache_hits"] > 0


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_policies_change_what_the_model_says(alone, name):
    """Else the tests below could not fail."""
    assert all(a != b for a, b in zip(alone(POLICIES[name]), alone(None), strict=True))
    assert len({tuple(tokens) for tokens in alone(POLICIES[name])}) == len(PROMPTS)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_do_not_depend_on_mates_chunks_prefix_hits_or_preemption(alone, crowded, name):
    check(crowded(POLICIES[name]), alone(POLICIES[name]))


@pytest.mark.full
@pytest.mark.parametrize("name", POLICIES)
def test_tokens_do_not_depend_on_the_prefix_cache(start, alone, name):
    check(start(POLICIES[name], enable_prefix_caching=False), alone(POLICIES[name]))


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in POLICIES if name != "following"])
def test_prompts_may_pass_the_layers_one_by_one(start, alone, name, monkeypatch):
    monkeypatch.setattr(layered, "TOKENS_OF_A_GROUP", 4)
    llm = start(POLICIES[name], prefill="layered")
    spans = set()
    dispatch = llm.llm_engine.core.runner.dispatch
    llm.llm_engine.core.runner.dispatch = lambda plan: spans.add(plan.span) or dispatch(plan)
    check(llm, alone(POLICIES[name]))
    assert {(0, 1), (1, 2)} <= spans


@pytest.mark.full
@pytest.mark.parametrize(
    "policy",
    [
        dataclasses.replace(QUEST, budget=160),
        StreamingLLM(window=160),
        dataclasses.replace(HALVES, budget=160, local=160),
        FlashPrefill(alpha=0),
        Blasst(threshold_scale_factor=0),
        dataclasses.replace(FOLLOWS, percent=100),
        dataclasses.replace(FOLLOWS, percent=100, anchors=(0, 1)),
        H2O(heavy=80, recent=80),
        SnapKV(budget=160),
    ],
    ids=str,
)
def test_a_policy_that_selects_all_pages_is_dense(start, alone, policy):
    of_both = [] if policy.retain else [SparseAttention(decode=policy, prefill=dataclasses.replace(policy, reselect=1))]
    for sparse in (policy, *of_both):
        assert run(start(sparse)) == alone(None)


@pytest.mark.full
def test_united_rows_that_select_all_pages_are_dense(start, alone):
    assert run(start(SparseAttention(prefill=CompactAttention(alpha=0)))) == alone(None)


MESHES = [
    (ANSWERS, 2, 1),
    (BOTH, 2, 3),
    (SAME, 4, 1),
    (SELDOM, 4, 2),
    (LSERVE, 2, 1),
    (FLASH, 2, 3),
    (COMPACT, 4, 1),
    (LABELS, 4, 1),
    (SKIP, 1, 3),
    (FOLLOWING, 4, 1),
    (HEAVY, 2, 3),
    (VOTED, 4, 1),
]


@pytest.mark.parametrize(("sparse", "kv", "tp"), [pytest.param(*c, marks=pytest.mark.full) for c in MESHES])
def test_tokens_do_not_depend_on_the_mesh(start, alone, sparse, kv, tp):
    llm = start(sparse, kv_parallel_size=kv, tensor_parallel_size=tp, num_pages=28, enable_prefix_caching=False)
    assert run(llm) == alone(sparse)


def forget(llm):
    assert llm.llm_engine.reset_prefix_cache()


def test_an_answer_that_is_computed_again_goes_through_the_decode_policy(alone, crowded, monkeypatch):
    """As part of a prompt it would say something else."""
    llm = crowded(SELDOM)
    pack = llm.llm_engine.core.runner._pack

    def all_prompt(plan, shape):
        ints = pack(plan, shape)
        ints[len(ints) - shape.prefill_seqs :] = 2**30
        return ints

    monkeypatch.setattr(llm.llm_engine.core.runner, "_pack", all_prompt)
    assert run(llm) != alone(SELDOM)
    monkeypatch.undo()
    forget(llm)
    assert run(llm) == alone(SELDOM)


def test_pages_with_answers_are_not_shared_with_prompts(alone, crowded, monkeypatch):
    """A prompt with an earlier answer in it gets the tokens that it gets without a prefix cache."""
    llm = crowded(SELDOM)
    answered = PROMPTS[0] + alone(SELDOM)[0]
    cache = llm.llm_engine.core.scheduler.cache
    forget(llm)
    fresh = run(llm, [answered])
    for shares in (False, True):
        monkeypatch.setattr(cache, "_share_answers", shares)
        forget(llm)
        assert run(llm, PROMPTS[:1]) == alone(SELDOM)[:1]
        assert (run(llm, [answered]) == fresh) is not shares
    forget(llm)


def test_shared_pages_keep_their_metadata_and_others_forget_them(alone, crowded):
    """Planted metadata are read where a prefix is found, and gone where a page has a new owner."""
    llm = crowded(SELDOM)
    device = llm.llm_engine.core.runner.device
    forget(llm)
    assert run(llm, PROMPTS[:1]) == alone(SELDOM)[:1]
    device.kv["full"] = dataclasses.replace(device.kv["full"], meta=-device.kv["full"].meta)
    assert run(llm, PROMPTS[:1]) != alone(SELDOM)[:1]
    forget(llm)
    device.kv["full"] = dataclasses.replace(device.kv["full"], meta=jnp.full_like(device.kv["full"].meta, jnp.inf))
    assert run(llm) == alone(SELDOM)


def test_an_answer_that_is_computed_again_drops_what_it_dropped(alone, crowded, monkeypatch):
    """As part of a prompt it would say something else."""
    llm = crowded(HEAVY)
    pack = llm.llm_engine.core.runner._pack

    def all_prompt(plan, shape):
        ints = pack(plan, shape)
        lens = ints[len(ints) - shape.prefill_seqs :]
        lens[: len(plan.prefill)] = [row.request.num_tokens for row in plan.prefill]
        return ints

    monkeypatch.setattr(llm.llm_engine.core.runner, "_pack", all_prompt)
    assert run(llm) != alone(HEAVY)
    monkeypatch.undo()
    assert run(llm) == alone(HEAVY)


def test_pages_of_sequences_that_drop_tokens_are_not_shared(alone, crowded):
    """Neither prompts nor answers: a second request computes all of its prompt, and says what it says alone."""
    llm = crowded(HEAVY)
    scheduler = llm.llm_engine.core.scheduler
    assert run(llm, PROMPTS[:1] * 2) == alone(HEAVY)[:1] * 2
    assert scheduler.pool.num_cached == 0
    assert llm.get_metrics()["jaxserve:prefix_cache_hits"] == 0
    two = SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=3, ignore_eos=True)  # the second waits for nothing
    (found,) = llm.generate(PROMPTS[:1], two, use_tqdm=False)
    assert [len(output.token_ids) for output in found.outputs] == [3, 3]


BAD = [
    ("magic", r"must name a policy among \['.*'lserve', 'quest',.*'streaming_llm'\], or be one or None, got 'magic'"),
    (7, "must name a policy among .*, got 7"),
    ({}, "must have the key policy, or keys among"),
    ({"decode": "quest", "both": "quest"}, r"keys among .*, got \['both', 'decode'\]"),
    ('{"policy": "quest", ', "must be JSON if it begins with a brace"),
    (
        {"policy": "quest", "pages": 3},
        r"quest must have fields among \['budget', 'layers', 'reselect'\], got \['pages'\]",
    ),
    ({"policy": "quest", "budget": "many"}, "budget of Quest must be an integer of at least 0, got 'many'"),
    ({"policy": "quest", "layers": [2]}, r"layers of Quest must be \(first, one after the last or None\), got \(2,\)"),
    ({"policy": "quest", "layers": [2, 2]}, "layers of Quest must be"),
    ({"policy": "quest", "reselect": 0}, "reselect of Quest must be at least 1, got 0"),
    ({"prefill": {"policy": "quest", "reselect": 2}}, "each token of a prompt selects: its reselect must be 1, got 2"),
    ({"policy": "streaming_llm", "window": 0}, "window of StreamingLLM must be at least 1, got 0"),
    ({"policy": "quest", "budget": 23, "layers": [0, 2]}, "at least 3 pages of 8 tokens, got room for 2; give it 24"),
    ({"policy": "flash_prefill", "alpha": 1.5}, r"alpha of FlashPrefill must be a number in \[0, 1\], got 1.5"),
    (
        {"policy": "blasst", "threshold_scale_factor": -1},
        "threshold_scale_factor of Blasst must be a number of at least 0, got -1",
    ),
    ({"policy": "blasst", "reselect": 2}, "Blasst selects nothing, so reselect must be 1, got 2"),
    ("kascade", r"anchors of Kascade must be layers in ascending order from 0 on, .*, got \(\)"),
    ({"policy": "kascade", "anchors": [0, 2, 1], "heads": [[0]]}, r"in ascending order .*, got \(0, 2, 1\)"),
    ({"policy": "kascade", "percent": 101}, "percent of Kascade must be at most 100, got 101"),
    ({"policy": "kascade", "layers": [1, None]}, r"layers must be \(0, None\) and reselect 1, got \(1, None\) and 1"),
    (
        {"policy": "kascade", "anchors": [0], "heads": [[0, 1, 3], [0, 1, 2]]},
        "must be one among 3 for each of 2 layers and 3 KV heads",
    ),
    (
        {"policy": "kascade", "anchors": [0, 2], "heads": [[0, 1, 2], [0, 1, 2]]},
        "anchors of Kascade must be among 2 layers, got 2",
    ),
    ("double_sparsity", r"channels of DoubleSparsity must be at least 1 .* jaxserve calibrate writes, got \(\)"),
    ({"policy": "double_sparsity", "channels": [[[1], [2, 3]]]}, "and for all as many"),
    ({"policy": "double_sparsity", "channels": [[[-1]]]}, "channels of DoubleSparsity must be at least 1"),
    (
        {"policy": "double_sparsity", "channels": [[[1], [2], [3]]] * 3},
        "must be of this model's 2 layers and 3 KV heads, got 3 and 3",
    ),
    ({"policy": "double_sparsity", "channels": [[[1], [2], [8]]] * 2}, "channels must be among the head's 8, got 8"),
    ("compact_attention", "CompactAttention is for prompts alone; give it as prefill, got it as decode"),
    ({"policy": "lserve", "parts": 0}, "parts of LServe must be at least 1, got 0"),
    ({"policy": "lserve", "parts": 3}, "parts of LServe must divide a page of 8 tokens, got 3"),
    ({"policy": "lserve", "streaming_heads": [[1, 2, 3]]}, "streaming_heads of LServe must be pairs of layer and KV"),
    (
        {"policy": "lserve", "streaming_heads": [[1, 3]]},
        r"streaming_heads of LServe must be among 2 layers and 3 KV heads, got \(1, 3\)",
    ),
    (
        {"policy": "lserve", "budget": 16, "streaming_heads": [[1, 2]]},
        "budget of LServe must hold 3 pages of 8 tokens, got 16",
    ),
    ({"prefill": "snapkv"}, "SnapKV drops tokens once a prompt is read as a whole, so prefill must be None"),
    ("quest", r"layers of Quest must lie within the model's 2, got \(2, None\)"),
    ({"policy": "quest", "layers": [0, 3]}, r"must lie within the model's 2, got \(0, 3\)"),
]


@pytest.mark.parametrize(("wanted", "message"), BAD, ids=str)
def test_bad_options_are_refused_at_the_start(start, wanted, message):
    with pytest.raises(ValueError, match=message):
        start(wanted)


def test_streaming_heads_are_refused_where_ranks_share_out_the_heads(start):
    with pytest.raises(ValueError, match="streaming_heads of LServe need tensor_parallel_size 1"):
        start(HALVES, tensor_parallel_size=3)


@pytest.mark.parametrize("policy", [QUEST, H2O()], ids=str)
def test_more_ranks_of_tp_than_kv_heads_are_refused_where_heads_are_scored(start, policy):
    with pytest.raises(ValueError, match="tensor_parallel_size must be at most the number of KV heads"):
        start(policy, tensor_parallel_size=6)


def test_steps_must_hold_a_page_of_a_prompt_beside_all_answers_where_rows_are_united(start):
    with pytest.raises(
        ValueError, match="cut after multiples of 8 tokens, so max_num_batched_tokens must be at least 12"
    ):
        start(COMPACT, max_num_batched_tokens=11)


def test_layered_prefill_is_refused_where_layers_follow_others(start):
    with pytest.raises(ValueError, match=r"from layer to layer .* prefill must be 'chunked', got 'layered'"):
        start(FOLLOWING, prefill="layered")


def test_kv_parallelism_is_refused_where_pages_are_compared_with_all_before(start):
    with pytest.raises(ValueError, match="so kv_parallel_size must be 1, got 2; raise tensor_parallel_size instead"):
        start(SKIP, kv_parallel_size=2, num_pages=28)


def test_a_model_of_sliding_windows_alone_is_refused(tmp_path):
    model = folder_of(MODELS["sliding"], tmp_path / "model")
    with pytest.raises(ValueError, match=r"layers \(0, None\) of Quest all have a sliding window"):
        LLM(model, sparse_attention=QUEST, **OPTIONS)


def test_metadata_count_towards_the_memory_of_the_cache(start):
    pages = [start(s, num_pages=None, kv_cache_memory_bytes=1 << 20).llm_engine.core.runner for s in (None, QUEST)]
    token_bytes = 2 * 2 * 3 * 8 * 4  # keys and values, layers, KV heads, head_dim
    assert [runner.config.num_pages for runner in pages] == [
        (1 << 20) // (8 * token_bytes), (1 << 20) // (8 * token_bytes + token_bytes)
    ]  # fmt: skip


@pytest.mark.parametrize("line", re.findall(r"^jaxserve generate [^$\n]*$", PAGE, flags=re.MULTILINE))
def test_the_commands_of_the_documentation_reach_the_engine(line, monkeypatch, capsys):
    def stop(options):
        assert EngineConfig.of(**options).runtime.sparse is not None
        raise EngineDeadError("as far as the engine")

    monkeypatch.setattr("jaxserve.cli.engine.start", stop)
    assert cli.run(shlex.split(line)[1:]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "error: as far as the engine"


def test_the_documentation_names_every_policy_and_its_defaults():
    for name, kind in POLICY_KINDS.items():
        (row,) = re.findall(rf"^\| `{name}` \|.*", PAGE, flags=re.MULTILINE)
        for field in dataclasses.fields(kind):
            default = "null" if field.default is None else json.dumps(field.default)
            assert f"`{field.name}` {default}" in row
