"""Float32 tokens do not depend on the mesh, and a step holds the collectives that the design names and no others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import DENSE, EDITED, GREEDY, MODELS, OPTIONS, PROMPTS, SEEDED, collectives, folder_of, start, tokens

from jaxserve.device import Rows
from jaxserve.exceptions import ParameterError
from jaxserve.layers.sampler import SamplingFeatures
from jaxserve.scheduler import layered
from jaxserve.step_programs import SampleShape, StepShape

FEW = [("dense", 2, 2)]
ALL = [(name, kv, n // kv) for name in MODELS for n in (2, 4, 8) for kv in (1, 2, 4, 8) if n % kv == 0]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {name: folder_of(config, root / name) for name, config in MODELS.items()}


@pytest.fixture(scope="module")
def alone(models):
    """Tokens of one device, by model."""
    found = {}

    def of(name):
        if name not in found:
            llm = start(models[name])
            found[name] = tokens(llm)
            assert len({tuple(t) for t in found[name]}) == len(PROMPTS)
            llm.close()
        return found[name]

    return of


@pytest.fixture(scope="module")
def llm(models):
    """2 ranks of kv x 2 of tp."""
    llm = start(models["dense"], kv_parallel_size=2, tensor_parallel_size=2)
    yield llm
    llm.close()


def check_tokens(llm, want, kv):
    """Also that each rank had at least three pages of the longest prompt."""
    engine = llm.llm_engine
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, GREEDY)
    got, most = {}, np.zeros(kv, int)
    while engine.has_unfinished_requests():
        got |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
        for request in engine.core._requests.values():
            if request.slot is not None and len(request.prompt_token_ids) == len(PROMPTS[0]):
                most = np.maximum(most, request.pages_by_rank)
    assert [got[str(i)] for i in range(len(PROMPTS))] == want
    assert min(most) >= 3


@pytest.mark.parametrize(
    ("name", "kv", "tp"), [pytest.param(*c, marks=() if c in FEW else pytest.mark.full) for c in ALL]
)
def test_tokens_are_those_of_one_device(request, models, alone, name, kv, tp):
    if (name, kv, tp) == FEW[0]:
        check_tokens(request.getfixturevalue("llm"), alone(name), kv)
        return
    llm = start(models[name], kv_parallel_size=kv, tensor_parallel_size=tp)
    check_tokens(llm, alone(name), kv)
    llm.close()


def test_swapped_pages_are_noticed(llm, alone):
    """Each rank of kv attends to its own pages: with those of another it says something else."""
    engine = llm.llm_engine
    for i, prompt in enumerate(PROMPTS[2:4]):
        engine.add_request(str(i), prompt, GREEDY)
    got = {}
    for _ in range(4):
        engine.step()
    runner, num_pages = engine.core.runner, OPTIONS["num_pages"] // 2
    for swap in (True, False):  # and back, for the tests that follow
        if not swap:
            while engine.has_unfinished_requests():
                got |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
        runner.device.kv = jax.tree.map(
            lambda pages: jax.device_put(jnp.roll(pages, num_pages, axis=1), pages.sharding), runner.device.kv
        )
    assert [got["0"], got["1"]] != alone("dense")[2:4]
    assert engine.reset_prefix_cache()


def test_a_step_holds_the_collectives_of_the_design(llm):
    """A layer: one all-reduce after attention, one after the MLP, and one all-to-all between ranks of kv. One
    all-reduce more for the embedding. No keys or values pass between ranks.
    """
    programs = llm.llm_engine.core.runner.device.forward
    for shape in (
        StepShape(decode_rows=2, prefill_tokens=0, prefill_seqs=0),
        StepShape(decode_rows=2, prefill_tokens=16, prefill_seqs=2),
    ):
        layers = DENSE["num_hidden_layers"]
        assert collectives(programs.get(shape)[1]) == {"all-reduce": 2 * layers + 1, "all-to-all": layers}


def test_sampling_gathers_no_logits(llm):
    """The best of each rank, or an exchange of columns for rows; then 4 bytes a row and result."""
    programs = llm.llm_engine.core.runner.device.sample
    greedy = programs.get(SampleShape(rows=2, features=SamplingFeatures()))[1]
    assert collectives(greedy) == {"all-gather": 1}
    random = programs.get(SampleShape(rows=2, features=SamplingFeatures(random=True)))[1]
    assert collectives(random) == {"all-to-all": 1, "all-gather": 1}
    for program in (greedy, random):
        (gathered,) = [line for line in program.as_text().splitlines() if " all-gather" in line]
        assert "s32[" in gathered.partition("=")[2][:6]  # ids, and floats as bits beside them


def test_writing_slots_and_tables_needs_no_collective(llm):
    runner = llm.llm_engine.core.runner
    for programs, rows in ((runner.device.update_tables, 16), (runner.device.start_slots, 8)):
        assert not collectives(programs.get(Rows(rows))[1])


def test_each_device_holds_its_share(llm):
    runner, layer = llm.llm_engine.core.runner, llm.llm_engine.core.runner.device.params["layers"][0]
    shards = {name: leaf.addressable_shards[0].data.shape for name, leaf in layer.items()}
    assert shards["gate_up"] == (2 * 17, 32)
    assert shards["down"] == (32, 17)
    assert shards["qkv"] == ((8 + 2 + 2) * 8, 32)  # 2 of the 3 KV heads, and zeros for a fourth
    assert shards["o"] == (32, 4 * 8)
    assert runner.device.params["embed"].addressable_shards[0].data.shape == (81, 32)
    assert runner.device.kv["full"].k.addressable_shards[0].data.shape == (2, 240, 4, 2, 8)
    assert len(runner.device.params["embed"].sharding.device_set) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be an integer >= 1, got 0"),
        ({"kv_parallel_size": None}, "kv_parallel_size must be an integer >= 1, got None"),
        ({"tensor_parallel_size": 16}, "needs 16 devices, got 8 .*; lower one of them"),
        ({"kv_parallel_size": 4, "num_pages": 401}, "multiple of kv_parallel_size 4 .*, got 401; give 404"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_are_refused(models, options, message):
    with pytest.raises((ParameterError, ValueError), match=message):
        start(models["dense"], **options)


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"prefill": "layered"},
        {"async_scheduling": False, "enable_prefix_caching": False, "page_size": 16},
        {"max_num_seqs": 8, "max_num_batched_tokens": 128},
    ],
    ids=str,
)
@pytest.mark.parametrize(("kv", "tp"), [(4, 1), (2, 4)])
def test_the_mesh_composes_with(models, alone, options, kv, tp, monkeypatch):
    monkeypatch.setattr(layered, "TOKENS_OF_A_GROUP", 4)
    llm = start(models["dense"], kv_parallel_size=kv, tensor_parallel_size=tp, **options)
    assert tokens(llm) == alone("dense")
    assert tokens(llm) == alone("dense")  # a second time, with a filled prefix cache
    spans = {shape.span for shape in llm.llm_engine.core.runner.device.forward._ready} - {None}
    assert spans == ({(0, 1), (1, 2)} if "prefill" in options else set())
    llm.close()


@pytest.mark.full
def test_pages_in_float8_are_split_with_their_scales(models):
    one = start(models["dense"], kv_cache_dtype="fp8")
    split = start(models["dense"], kv_cache_dtype="fp8", kv_parallel_size=2, tensor_parallel_size=3)
    assert tokens(split) == tokens(one)
    for llm in (one, split):
        llm.close()


@pytest.mark.full
@pytest.mark.parametrize(("kv", "tp"), [(4, 1), (2, 4)])
def test_preempted_requests_go_on_as_on_one_device(models, alone, kv, tp):
    few = 40 + kv  # those of one request of max_model_len, and a null page a rank
    llm = start(models["dense"], kv_parallel_size=kv, tensor_parallel_size=tp, num_pages=few, max_num_seqs=4)
    assert tokens(llm) == alone("dense")
    assert llm.get_metrics()["jaxserve:num_preemptions"] > 0
    llm.close()


@pytest.mark.full
@pytest.mark.parametrize(("kv", "tp"), [(1, 8), (3, 1)])
def test_sampling_is_that_of_one_device(models, kv, tp):
    """Top-k, top-p, penalties and logprobs, also where the ranks are more than the rows."""
    found = []
    for sizes in ({}, {"kv_parallel_size": kv, "tensor_parallel_size": tp}):
        llm = start(models["dense"], **sizes)
        outputs = llm.generate([*PROMPTS, *PROMPTS], [SEEDED] * 5 + [EDITED] * 5, use_tqdm=False)
        logprobs = [[entry.logprob for d in o.outputs[0].logprobs for entry in d.values()] for o in outputs[5:]]
        prompts = [[entry.logprob for d in o.prompt_logprobs[1:] for entry in d.values()] for o in outputs[5:]]
        found.append(([o.outputs[0].token_ids for o in outputs], [x for some in logprobs + prompts for x in some]))
        llm.close()
    assert found[0][0] == found[1][0]
    np.testing.assert_allclose(found[1][1], found[0][1], atol=1e-4)
