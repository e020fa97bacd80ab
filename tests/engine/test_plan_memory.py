"""What a plan says of memory is what the engine then holds, byte for byte, and so are the shapes to compile for."""

import jax
import pytest
from meshes import MODELS, OPTIONS, folder_of

from jaxserve import LLM
from jaxserve.config import DeviceMemory, EngineConfig
from jaxserve.device import state_shapes
from jaxserve.models import get_model
from jaxserve.plan import memory_of
from jaxserve.step_builder import State

FREE = {name: value for name, value in OPTIONS.items() if name != "num_pages"} | {"kv_cache_memory_bytes": 200_000}
CASES = [  # the sizes divide neither heads nor rows
    ("dense", 1, 1, {}),
    ("dense", 2, 2, {"kv_cache_dtype": "fp8"}),
    ("dense", 1, 8, {}),
    ("one kv head", 3, 2, {}),
    ("sliding", 2, 1, {"dtype": "bfloat16"}),
    ("experts", 1, 4, {}),
    ("experts", 8, 1, {"kv_cache_dtype": "fp8"}),
    ("dense", 2, 1, {"sparse_attention": {"policy": "lserve", "budget": 24, "parts": 2}}),
    ("dense", 2, 3, {"sparse_attention": {"policy": "h2o", "heavy": 8, "recent": 8}}),
]


def held(leaves, device) -> int:
    return sum(part.data.nbytes for leaf in leaves for part in leaf.addressable_shards if part.device == device)


def described(state: State) -> list[tuple]:
    leaves = jax.tree.leaves(state)
    mesh = [leaf.sharding for leaf in leaves if isinstance(leaf.sharding, jax.NamedSharding)]
    return [(leaf.shape, leaf.dtype, leaf.sharding.shard_shape(leaf.shape) if mesh else None) for leaf in leaves]


@pytest.mark.parametrize(("name", "kv", "tp", "options"), CASES)
def test_a_plan_weighs_what_the_engine_holds(tmp_path, name, kv, tp, options):
    model = folder_of(MODELS[name], tmp_path / "model")
    options = FREE | options | {"kv_parallel_size": kv, "tensor_parallel_size": tp}
    planned = memory_of(EngineConfig.of(model, **options), get_model(MODELS[name]), DeviceMemory.here())
    with LLM(model, **options) as llm:
        core = llm.llm_engine.core
        runner, pool = core.runner, core.scheduler.pool
        caches = runner.device.kv.values()
        carried = [kv.carry for kv in caches]
        state = jax.tree.leaves((runner.device._sequences, runner.device._sampling, carried))
        pages = jax.tree.leaves([(kv.k, kv.v, kv.meta, kv.mass) for kv in caches])
        for device in jax.devices()[: kv * tp]:
            assert held(jax.tree.leaves(runner.device.params), device) == planned.weights_bytes
            assert held(pages, device) == planned.pool_bytes
            assert held(state, device) == planned.state_bytes
        assert runner.config.num_pages == planned.num_pages > kv
        assert pool.num_usable * pool.page_size == planned.num_tokens
        assert runner.config == planned.runner
        state = State(runner.device.params, runner.device.kv, runner.device._sequences, runner.device._sampling)
        kv_dtype = EngineConfig.of(model, **options).kv_dtype
        assert described(state_shapes(runner.device.model, state.params, runner.config, kv_dtype)) == described(state)
