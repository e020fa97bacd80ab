"""Realistic models on TPU topologies: steps compile, hide no copy of weights or cache, and take the memory planned."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.plan import plan
from jaxserve.weights.dummy import SHAPES

COMPILERS = Path(sys.prefix) / "ahead-of-time"  # scripts/check installs libtpu there, apart from jax
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not (COMPILERS / "libtpu").is_dir(), reason=f"libtpu is not in {COMPILERS}"),
]
DECODE = ("decode_8", "decode_64", "decode_256")  # 8 is the smallest: of one sequence, too
MATRIX = {  # model, topology, tp, a step with chunks of prompts, one with layers of them
    "llama-8b-v5e-8": ("llama-3.1-8b", "v5e-8", 8, "mixed_64_8128", "layered_64_7936_8_10"),
    "llama-8b-v6e-4": ("llama-3.1-8b", "v6e-4", 4, "mixed_64_8128", "layered_64_7936_8_10"),
    "llama-70b-v5p-8": ("llama-3.1-70b", "v5p-8", 4, "mixed_64_8128", "layered_64_7936_20_25"),
    "llama-70b-v6e-16": ("llama-3.1-70b", "v6e-16", 16, "mixed_64_8128", "layered_64_7936_20_25"),
    "qwen3-30b-v6e-8": ("qwen3-30b-a3b", "v6e-8", 8, "mixed_64_8128", "layered_64_7936_12_15"),
}
MILLION = 1 << 20
SPLITS = {"v6e-8": (8, 1), "v5p-8": (2, 2)}  # kv, tp


def compile_programs(model: str, topology: str, kv: int, tp: int, *options: str) -> dict:
    program = "import sys; from jaxserve.cli import main; sys.argv[0] = 'jaxserve'; main()"
    sizes = ("--kv-parallel-size", str(kv), "--tensor-parallel-size", str(tp))
    command = [sys.executable, "-c", program, "compile", "--model", model, "--topology", topology, *sizes, *options]
    path = os.pathsep.join([str(COMPILERS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@functools.cache
def of_the_matrix(case: str) -> tuple[dict, dict]:
    """What was compiled, and the programs by name."""
    model, topology, tp, *prompts = MATRIX[case]
    only = [word for name in (*DECODE, *prompts) for word in ("--only", name)]
    found = compile_programs(model, topology, 1, tp, "--prefill", "layered", *only)
    return found, {program["name"]: program for program in found["programs"]}


def check_memory(found: dict, num_layers: int, **options) -> None:
    """Against the plan, and for copies: what is left beside the arguments are activations."""
    planned = plan(found["model"], found["topology"], **options).splits
    (split,) = planned
    weights, pool = found["weights_bytes"], found["pool_bytes"]
    assert (weights, found["state_bytes"]) == (split.weights_bytes, split.state_bytes)
    assert pool == pytest.approx(split.pool_bytes, rel=1e-6)  # a plan leaves out the scales of pages in 8 bits
    total = weights + pool + found["state_bytes"]
    for program in found["programs"]:
        arguments, temp = program["argument_bytes"], program["temp_bytes"]
        assert 0.9 * total < arguments + temp <= program["needed_bytes"] < 1.1 * total, program["name"]
        decodes = program["name"].startswith("decode")
        assert temp < (weights / num_layers / 2 if decodes else weights / 4), program["name"]
        assert temp < pool / 8, program["name"]
        assert program["vmem_bytes"] is None or program["vmem_bytes"] < 32 << 20


@pytest.mark.parametrize("case", MATRIX)
def test_steps_compile_and_take_the_memory_planned(case):
    found, programs = of_the_matrix(case)
    model, _, tp, *prompts = MATRIX[case]
    assert set(programs) == {*DECODE, *prompts}
    sizes = {"kv_parallel_size": 1, "tensor_parallel_size": tp}
    check_memory(found, SHAPES[model]["num_hidden_layers"], context=4096, batch=16, **sizes)
    assert found["needed_bytes"] < found["memory_bytes"]


@pytest.mark.parametrize("topology", SPLITS)
def test_a_million_tokens_decode_over_all_devices(topology, tmp_path):
    """Llama-3.1-8B with positions for it, its pages in 8 bits."""
    model, (kv, tp) = tmp_path / "model", SPLITS[topology]
    model.mkdir()
    shape = SHAPES["llama-3.1-8b"] | {"max_position_embeddings": MILLION}
    (model / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    options = ("--kv-cache-dtype", "fp8", "--max-model-len", str(MILLION), "--only", "decode_8")
    found = compile_programs(str(model), topology, kv, tp, *options)
    assert found["sizes"]["max_model_len"] == MILLION
    assert found["programs"][0]["vmem_bytes"] is not None  # a kernel reads the pages
    sizes = {"kv_parallel_size": kv, "tensor_parallel_size": tp}
    check_memory(found, shape["num_hidden_layers"], context=MILLION, batch=1, kv_cache_dtype="fp8", **sizes)
