"""Step programs compile for accelerators that are not here, and hide no copy of the weights or the KV cache.

The temporary memory of a compiled program is the cheapest detector of such a copy: arguments are donated or read in
place, so what is left is activations. For the H200 they also use the Hopper kernels, and do nothing twice.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "ahead_of_time.py"


COMPILERS = Path(sys.prefix) / "ahead-of-time"  # scripts/check installs them there, apart from jax


@functools.cache
def compiled_for(platform: str) -> dict:
    command = [sys.executable, str(PROGRAM), platform]
    paths = [str(COMPILERS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, env=environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def needs(package: str) -> pytest.MarkDecorator:
    found = (COMPILERS / package).is_dir()
    return pytest.mark.skipif(not found, reason=f"{package} is not in {COMPILERS}; scripts/check puts it there")


@pytest.mark.parametrize(
    "platform",
    [
        "cpu",
        pytest.param("tpu", marks=needs("libtpu")),
        pytest.param("cuda", marks=[pytest.mark.full, needs("jax_cuda13_plugin")]),
    ],
)
def test_step_programs_copy_neither_the_weights_nor_the_cache(platform):
    found = compiled_for(platform)
    for name, program in found["programs"].items():
        assert program["alias_bytes"] >= found["cache_bytes"], f"{name}: the cache is not donated"
        assert program["temp_bytes"] < found["weights_bytes"] / 2, name
        assert program["temp_bytes"] < found["cache_bytes"] / 8, name


@pytest.mark.parametrize(
    "platform",
    [
        pytest.param("tpu", marks=needs("libtpu")),
        pytest.param("cuda", marks=[pytest.mark.full, needs("jax_cuda13_plugin")]),
    ],
)
def test_steps_of_two_devices_copy_neither_the_weights_nor_the_cache(platform):
    """Each device holds half of both."""
    found = compiled_for(platform)
    assert set(found["meshes"]) == {"tp", "kv"}
    for name, program in found["meshes"].items():
        assert program["alias_bytes"] >= found["cache_bytes"] / 2, f"{name}: the cache is not donated"
        assert program["temp_bytes"] < found["weights_bytes"] / 4, name


@needs("libtpu")
def test_kernels_for_tpus_fit_their_memory_and_copy_neither_pages_nor_weights():
    """A compile that needs too much vector memory fails. Keys are 512 MiB a layer, as values; experts 150 or 1,200."""
    kernels = compiled_for("tpu")["kernels"]
    assert sum("experts" in name for name in kernels) == 2
    for name, kernel in kernels.items():
        assert kernel["temp_bytes"] < 4 << 20, name
        assert kernel["calls"] == (2 if "experts" in name else 1), name


@pytest.mark.full
@needs("libtpu")
def test_attention_compiles_for_other_tpus():
    """Beside a kernel's own, the vector memory of a v5p or 7x has no room for the tiles of queries and outputs."""
    kernels = compiled_for("tpus")["attention"]
    assert {name.partition("_")[0] for name in kernels} == {"v5e", "v5p", "tpu7x"}
    for name, kernel in kernels.items():
        assert kernel["calls"] == 1, name
        assert kernel["temp_bytes"] < (160 << 20 if "v5p" in name else 32 << 20), name  # keys of a layer are 512 MiB


@pytest.mark.full
@needs("libtpu")
def test_experts_on_tpus_are_read_where_they_lie():
    experts = compiled_for("tpus")["experts"]
    assert {name.partition("_")[0] for name in experts} == {"v5e", "v5p", "v6e", "tpu7x"}
    for name, kernel in experts.items():
        many = int(name.split("_")[2]) > 256  # tokens: then their rows are what memory there is
        assert kernel["calls"] == 2, name
        half_a_layer = 128 * 3 * 2048 * 768 * 2 / 2
        assert kernel["temp_bytes"] < (half_a_layer if many else 32 << 20), name


@pytest.mark.full
@needs("libtpu")
def test_steps_of_a_mixture_on_tpus_use_the_kernels():
    """The write of keys and values, attention, the experts and their sum, in the one layer of a turn."""
    found = compiled_for("tpus")
    assert set(found["programs"]) == {"one", "tp", "kv"}
    for name, program in found["programs"].items():
        assert program["kernels"] == 4, name
        assert program["temp_bytes"] < found["weights_bytes"] / 6, name  # a layer's experts would be a tenth more


@needs("libtpu")
def test_steps_on_tpus_use_the_attention_kernel():
    """A turn of the loop takes one layer: it writes keys and values, and attends to pages in one region or in two."""
    programs = compiled_for("tpu")["programs"]
    assert {name: program["kernels"] for name, program in programs.items()} == {"decode": 2, "mixed": 3, "layered": 7}


@pytest.mark.full
@needs("jax_cuda13_plugin")
@pytest.mark.parametrize(("name", "exchanges"), [("tp", {}), ("kv", {"all-to-all": 8})])
def test_layers_on_two_hopper_cards_run_kernels_and_two_all_reduces(name, exchanges):
    """Eight layers a turn of the loop."""
    layers = compiled_for("cuda")["meshes"][name]["in_loop"]
    assert layers["kernels"] == dict.fromkeys(("rope_kv_write", "paged_attention_decode", "paged_attention_merge"), 8)
    assert layers["collectives"] == {"all-reduce": 16, **exchanges}
    assert layers["copies"] == 0


@pytest.mark.full
@needs("jax_cuda13_plugin")
def test_hopper_kernels_keep_what_they_work_on_in_registers():
    for name, kernel in compiled_for("cuda")["kernels"].items():
        assert kernel["registers"] > 0, name
        assert kernel["spilled_bytes"] <= (128 if "_256" in name else 0), name


@pytest.mark.full
@needs("jax_cuda13_plugin")
def test_policies_on_the_h200_select_by_kernels_without_loops_or_sorts():
    """Of which the host, or the device by a launch each, would have to be asked."""
    policies = compiled_for("cuda")["policies"]
    attention = {f"paged_attention_{name}": 1 for name in ("plan", "decode", "merge")}
    selection = {"page_scores": 1, "top_pages": 1}
    for name, found in policies.items():
        assert found["spilled_bytes"] <= (128 if "_256" in name else 0), name
        assert found["kernels"] == attention | (selection if name != "streaming_llm" else {}), name
        assert found["sorts"] == found["loops"] == found["copies"] == 0, name
        assert found["launches"] <= 12, name
        assert found["temp_bytes"] < 8 << 20, name  # metadata of a layer are 17 or 67 MB


@pytest.mark.full
@needs("jax_cuda13_plugin")
def test_steps_under_a_policy_on_the_h200_use_all_kernels_and_copy_no_cache():
    step, unrolled = compiled_for("cuda")["policy_step"], 8
    attention = {f"paged_attention_{name}": unrolled for name in ("plan", "decode", "merge")}
    others = dict.fromkeys(("page_scores", "top_pages", "rope_kv_write", "dense_layer"), unrolled)
    assert step["in_loop"]["kernels"] == attention | others
    assert step["in_loop"]["matmuls"] == step["in_loop"]["sorts"] == step["in_loop"]["copies"] == 0
    assert step["alias_bytes"] >= step["cache_bytes"]


@pytest.mark.full
@needs("jax_cuda13_plugin")
def test_experts_on_the_h200_are_read_where_they_lie():
    experts = {name: k for name, k in compiled_for("cuda")["kernels"].items() if name.startswith("experts")}
    assert len(experts) == 5
    for name, kernel in experts.items():
        assert kernel["temp_bytes"] < 128 * 3 * 2048 * 768 * 2 / 2, name  # half of one layer's weights


@pytest.mark.full
@needs("jax_cuda13_plugin")
@pytest.mark.parametrize(("name", "regions"), [("decode", ("decode",)), ("mixed", ("decode", "prefill"))])
def test_steps_on_the_h200_use_the_kernels_and_compute_no_matmul_twice(name, regions):
    program, unrolled = compiled_for("cuda")["programs"][name], 8
    kernels = program["in_loop"]["kernels"]
    for region in regions:
        assert kernels[f"paged_attention_{region}"] == unrolled
    assert kernels["paged_attention_merge"] == unrolled
    assert program["in_loop"]["copies"] == 0  # neither of the cache nor of attention's output, both written in place
    few = name == "decode"  # rows: all matmuls are in one kernel but that of the first layer's q k v
    assert kernels["rope_kv_write"] == unrolled
    assert kernels.get("dense_layer", 0) == few * unrolled
    assert program["in_loop"]["matmuls"] == (0 if few else 4 * unrolled)  # q k v, o, gate and up, down
    assert program["outside"]["matmuls"] == few
    assert not program["outside"]["kernels"]


@pytest.mark.full
@needs("jax_cuda13_plugin")
def test_steps_on_the_h200_plan_their_attention_before_the_loop_over_layers():
    programs = compiled_for("cuda")["programs"]
    for name in ("decode", "mixed"):
        program = programs[name]
        assert program["in_loop"]["cumulative_sums"] == program["in_loop"]["sorts"] == 0, name
        assert program["outside"]["cumulative_sums"] > 0, name
    assert programs["mixed"]["outside"]["sorts"] > 0
