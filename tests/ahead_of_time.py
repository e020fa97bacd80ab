"""Compiles step programs for an accelerator that is not here and prints their memory as JSON; run as a script.

    python tests/ahead_of_time.py cpu | tpu | cuda

The model is a small Llama in bfloat16, with its layers in the target's form and a KV cache that is larger than its
weights. Nothing is allocated: arguments are shapes. A process of its own, since libtpu reads its environment once.
"""

import functools
import json
import os
import sys
from pathlib import Path

TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # no metadata server to ask
    "TPU_WORKER_ID": "0",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # tests may run beside each other
    "TPU_LOG_DIR": "disabled",
}
os.environ.update(TPU_ENVIRONMENT, JAX_PLATFORMS="cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402

from jaxserve.layers.decoder import stack_layers  # noqa: E402
from jaxserve.layers.kv_cache import init_kv_cache  # noqa: E402
from jaxserve.layers.sampler import init_sequences  # noqa: E402
from jaxserve.models import get_model  # noqa: E402
from jaxserve.step_programs import StepShape, forward_step  # noqa: E402

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
NUM_PAGES, PAGE_SIZE, MAX_PAGES, NUM_SLOTS = 2048, 64, 64, 32
SHAPES = {
    "decode": StepShape(decode_rows=16, prefill_tokens=0, prefill_seqs=0),
    "mixed": StepShape(decode_rows=16, prefill_tokens=128, prefill_seqs=16),
}


def target(platform: str):
    """One device of the accelerator, known from its description alone; the CPU is here."""
    if platform == "cpu":
        return jax.devices()[0]
    if platform == "tpu":
        return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
    description = (Path(__file__).parent / "targets" / "h200.txtpb").read_text(encoding="utf-8")
    topology = topologies.get_topology_desc(platform="cuda", target_config=description, topology="1x1x1")
    return topology.devices[0]


def arguments(model, place: SingleDeviceSharding, *, stacked: bool):
    """Shapes of the parameters, the KV cache and the sequences' state, on the target."""

    def make():
        params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), model.abstract_params(jnp.bfloat16))
        if stacked:
            params = {**params, "layers": stack_layers(params["layers"], model.layer_kinds)}
        kv = init_kv_cache(model.config, num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=jnp.bfloat16)
        return params, kv, init_sequences(NUM_SLOTS, MAX_PAGES)

    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), jax.eval_shape(make))


def num_bytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def main(platform: str) -> None:
    model = get_model(LLAMA)
    place = SingleDeviceSharding(target(platform))
    params, kv, sequences = arguments(model, place, stacked=platform != "cpu")
    options = {"compiler_options": {"xla_gpu_enable_triton_gemm": False}} if platform == "cuda" else {}
    programs = {}
    for name, shape in SHAPES.items():
        step = jax.jit(functools.partial(forward_step, model, shape=shape), donate_argnums=(1, 2), **options)
        ints = jax.ShapeDtypeStruct((shape.num_ints,), jnp.int32, sharding=place)
        lowered = step.trace(params, kv, sequences, ints).lower(lowering_platforms=(platform,))
        memory = lowered.compile().memory_analysis()
        programs[name] = {"temp_bytes": memory.temp_size_in_bytes, "alias_bytes": memory.alias_size_in_bytes}
    print(json.dumps({"weights_bytes": num_bytes(params), "cache_bytes": num_bytes(kv), "programs": programs}))


if __name__ == "__main__":
    main(sys.argv[1])
