"""Compiles step programs for an accelerator that is not here and prints what became of them as JSON; run as a script.

    python tests/ahead_of_time.py cpu | tpu | tpus | cuda

The model is a small Llama in bfloat16, with its layers in the target's form and a KV cache that is larger than its
weights. Nothing is allocated: arguments are shapes. A process of its own, since libtpu reads its environment once.
The steps use the kernels for the target, an H200 or a v5e, which are also compiled one by one, for a v6e. On cuda and
tpu the steps are compiled for two devices too, with either kind of parallelism. With tpus the kernels are compiled for
all families of TPU, those of experts at more sizes, and decode steps of a small mixture.
"""

import collections
import contextlib
import dataclasses
import functools
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxserve.topologies import WITHOUT_TPU

PTXAS_FILES = tempfile.TemporaryDirectory()  # what the assembler says of each kernel's registers
CUDA_ENVIRONMENT = {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_TO": PTXAS_FILES.name}
os.environ.update(WITHOUT_TPU | CUDA_ENVIRONMENT)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import (  # noqa: E402
    AbstractDevice,
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    Sharding,
    SingleDeviceSharding,
    use_abstract_mesh,
)

from jaxserve.executables import COMPILER_OPTIONS  # noqa: E402
from jaxserve.layers.decoder import stack_layers  # noqa: E402
from jaxserve.layers.kv_cache import init_kv_cache, position_shape  # noqa: E402
from jaxserve.layers.moe import moe  # noqa: E402
from jaxserve.layers.sampler import init_sequences  # noqa: E402
from jaxserve.layers.sparse import LServe, Policy, Quest, SparseAttention, StreamingLLM  # noqa: E402
from jaxserve.layers.sparse.attend import attend_decode  # noqa: E402
from jaxserve.layers.sparse.state import init_state  # noqa: E402
from jaxserve.models import get_model  # noqa: E402
from jaxserve.pallas_kernels import dense_layer, paged_attention  # noqa: E402
from jaxserve.sharding.mesh import AXES, replicated  # noqa: E402
from jaxserve.sharding.rules import kv_specs  # noqa: E402
from jaxserve.step_programs import StepShape, forward_step  # noqa: E402

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
MIXTURE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 8,
    "moe_intermediate_size": 256,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}
PAGE_SIZE, MAX_PAGES, NUM_SLOTS = 64, 64, 32
# On cuda more than half of the card's memory: XLA counts what is donated twice, and once computed matmuls twice for it
NUM_PAGES = {"cpu": 2048, "tpu": 2048, "cuda": 80 * 1024}
SHAPES = {
    "decode": StepShape(decode_rows=16, prefill_tokens=0, prefill_seqs=0),
    "mixed": StepShape(decode_rows=16, prefill_tokens=128, prefill_seqs=16),
    "layered": StepShape(decode_rows=16, prefill_tokens=128, prefill_seqs=16, span=(4, 8), completes=False),
}


KERNELS_OF: dict[str, paged_attention.Implementation] = {"cpu": "xla", "cuda": "mosaic_gpu", "tpu": "mosaic_tpu"}
MESHES = {"tp": (1, 2), "kv": (2, 1)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelShape:
    num_seqs: int
    heads: tuple[int, int, int]  # N, K, H
    page_size: int = 64
    q_len: int = 1  # of a sequence that decodes
    prefill_rows: int = 0  # of all sequences; 0 = they decode
    dtype: Any = jnp.bfloat16  # of the cache
    by_kv_head: bool = False  # each KV head has a page table

    @property
    def rows(self) -> int:
        return self.prefill_rows or self.num_seqs * self.q_len


KERNELS = {
    "decode_32_8_128": KernelShape(num_seqs=64, heads=(32, 8, 128)),
    "decode_32_8_128_one_sequence": KernelShape(num_seqs=1, heads=(32, 8, 128)),  # many parts are merged at once
    "decode_24_8_128": KernelShape(num_seqs=64, heads=(24, 8, 128)),  # an odd group
    "decode_28_4_128": KernelShape(num_seqs=4, heads=(28, 4, 128)),
    "decode_9_3_64": KernelShape(num_seqs=64, heads=(9, 3, 64), page_size=16),
    "decode_8_4_64_eight_tokens": KernelShape(num_seqs=16, heads=(8, 4, 64), q_len=8),
    "decode_64_8_128_eight_tokens": KernelShape(num_seqs=16, heads=(64, 8, 128), q_len=8),  # the most rows
    "decode_8_4_256": KernelShape(num_seqs=16, heads=(8, 4, 256)),
    "decode_8_4_64_one_sequence": KernelShape(num_seqs=1, heads=(8, 4, 64)),
    "decode_32_8_128_by_kv_head": KernelShape(num_seqs=8, heads=(32, 8, 128), by_kv_head=True),
    "decode_9_3_64_by_kv_head": KernelShape(num_seqs=64, heads=(9, 3, 64), page_size=16, by_kv_head=True),
    "decode_8_4_256_by_kv_head": KernelShape(num_seqs=16, heads=(8, 4, 256), by_kv_head=True),
    "prefill_32_8_128_one_sequence": KernelShape(num_seqs=1, heads=(32, 8, 128), prefill_rows=512),
    "prefill_9_3_64": KernelShape(num_seqs=4, heads=(9, 3, 64), page_size=16, prefill_rows=512),
    "prefill_8_4_256": KernelShape(num_seqs=4, heads=(8, 4, 256), prefill_rows=512),
}
KERNELS |= {
    f"{name}_fp8": dataclasses.replace(KERNELS[name], dtype=jnp.float8_e4m3fn)
    for name in (
        "decode_32_8_128",
        "decode_24_8_128",
        "decode_9_3_64",
        "decode_8_4_64_eight_tokens",
        "decode_64_8_128_eight_tokens",
        "decode_8_4_256",
        "decode_32_8_128_by_kv_head",
        "prefill_32_8_128_one_sequence",
        "prefill_9_3_64",
        "prefill_8_4_256",
    )
}

TPU_KERNELS = {
    "decode_32_8_128": KERNELS["decode_32_8_128"],
    "decode_32_8_128_fp8": KERNELS["decode_32_8_128_fp8"],
    "decode_32_8_64": KernelShape(num_seqs=64, heads=(32, 8, 64), page_size=16),
    "decode_32_8_128_eight_tokens": KernelShape(num_seqs=16, heads=(32, 8, 128), q_len=8),
    "decode_8_4_256": KERNELS["decode_8_4_256"],
    "prefill_32_8_128": KernelShape(num_seqs=4, heads=(32, 8, 128), prefill_rows=512),
    "prefill_8_4_256_fp8": KERNELS["prefill_8_4_256_fp8"],
}

POLICIES = {  # and head_dim
    "quest": (Quest(budget=3276), 128),
    "quest_every_4": (Quest(budget=3276, reselect=4), 128),
    "quest_256": (Quest(budget=3276), 256),
    "lserve": (LServe(), 128),
    "streaming_llm": (StreamingLLM(), 128),
}

COLLECTIVES = r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
EXPERTS = {"experts_1": 1, "experts_5": 5, "experts_64": 64, "experts_300": 300, "experts_8192": 8192}  # tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsShape:
    """Of Qwen3-30B-A3B, if nothing else is said. One TPU can hold the experts of a few layers, or its rank's."""

    num_tokens: int
    num_layers: int = 8
    num_here: int = 128
    num_experts: int = 128
    top_k: int = 8
    D: int = 2048
    F: int = 768


RANK = {"num_here": 16, "num_layers": 48}  # of eight
TPU_EXPERTS = {
    "experts_64": ExpertsShape(num_tokens=64),
    "experts_256_of_a_rank": ExpertsShape(num_tokens=256, **RANK),
}
MORE_TPU_EXPERTS = {f"experts_{n}": ExpertsShape(num_tokens=n) for n in (1, 256, 8192)}
MORE_TPU_EXPERTS |= {f"experts_{n}_of_a_rank": ExpertsShape(num_tokens=n, **RANK) for n in (1, 64, 8192)}
MIXTRAL = {"num_layers": 2, "num_here": 8, "num_experts": 8, "top_k": 2, "D": 4096, "F": 14336}
MORE_TPU_EXPERTS |= {f"experts_{n}_in_blocks": ExpertsShape(num_tokens=n, **MIXTRAL) for n in (64, 4096)}


def targets(platform: str) -> list[Any]:
    """Two devices of the accelerator, known from its description alone; the CPU is here."""
    if platform == "cpu":
        return jax.devices()[:1]
    if platform == "tpu":
        return tpus("v5e")
    description = (Path(__file__).parent / "targets" / "h200.txtpb").read_text(encoding="utf-8")
    return topologies.get_topology_desc(platform="cuda", target_config=description, topology="1x1x2").devices


def tpus(family: str) -> list[Any]:
    shape = "2x2x1" if family in ("v5p", "tpu7x") else "2x2"
    return topologies.get_topology_desc(platform="tpu", topology_name=f"{family}:{shape}").devices


def arguments(model, platform: str, place: SingleDeviceSharding):
    """Shapes of the parameters, the KV cache and the sequences' state, on the target."""

    def make():
        params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), model.abstract_params(jnp.bfloat16))
        if platform != "cpu":
            params = {**params, "layers": stack_layers(params["layers"], model.layer_kinds)}
        kv = init_kv_cache(model.config, num_pages=NUM_PAGES[platform], page_size=PAGE_SIZE, dtype=jnp.bfloat16)
        return params, kv, init_sequences(NUM_SLOTS, MAX_PAGES)

    with jax.default_device(*place.device_set):
        shapes = jax.eval_shape(make)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes)


def on_mesh(model, args: tuple, mesh: Mesh) -> tuple:
    """The arguments, split over a mesh whose sizes divide everything."""
    params, kv, sequences = args
    specs = (model.param_specs(params), kv_specs(kv), jax.tree.map(lambda _: jax.P(), sequences))
    place = lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))  # noqa: E731
    return jax.tree.map(place, args, specs)


def num_bytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def compile_for(function, *args, **options):
    """For the devices that the arguments are on."""
    sharding = jax.tree.leaves(args)[0].sharding
    device = min(sharding.device_set, key=lambda device: device.id)
    mesh, platform = contextlib.nullcontext(), device.platform
    if platform == "gpu":
        options["compiler_options"], platform = COMPILER_OPTIONS["gpu"], "cuda"
        if isinstance(sharding, SingleDeviceSharding):  # Pallas asks a mesh which GPU it is; else the step brings one
            abstract = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
            mesh = use_abstract_mesh(AbstractMesh((1,), ("x",), (AxisType.Explicit,), abstract_device=abstract))
    with jax.default_device(device), mesh:
        return jax.jit(function, **options).trace(*args).lower(lowering_platforms=(platform,)).compile()


def kernels_of(compile_it: Callable[[], Any]) -> dict:
    """Registers and spilled bytes of a thread in the worst kernel of a call, and the temporary memory of the call."""
    files = Path(PTXAS_FILES.name)
    for file in files.iterdir():
        file.unlink()
    memory = compile_it().memory_analysis()
    said = "".join(file.read_text(encoding="utf-8") for file in files.glob("*ptxas*"))
    return {
        "registers": max(int(n) for n in re.findall(r"Used (\d+) registers", said)),
        "spilled_bytes": max(int(n) for n in re.findall(r"(\d+) bytes spill", said)),
        "temp_bytes": memory.temp_size_in_bytes,
    }


def compile_attention(shape: KernelShape, struct: Callable[..., Any], platform: str) -> Any:
    N, K, H = shape.heads
    position, num_pages = position_shape(K, H, shape.dtype, platform), 256
    if platform == "tpu":  # a GiB of keys, which no copy of can be put into the vector memory
        num_pages = 2**30 // (2 * shape.page_size * K * H * jnp.dtype(shape.dtype).itemsize)
    pages, scale = struct((2, num_pages, shape.page_size, *position), shape.dtype), None
    if shape.dtype == jnp.float8_e4m3fn:
        scale = struct((2, K), jnp.float32)
    tables = (shape.num_seqs, K) if shape.by_kv_head else (shape.num_seqs,)
    batch = paged_attention.AttentionBatch(
        page_table=struct((*tables, 64), jnp.int32),
        kv_lens=struct(tables, jnp.int32),
        cu_q_lens=struct((shape.num_seqs + 1,), jnp.int32) if shape.prefill_rows else None,
        max_q_len=shape.q_len,
    )
    attention = functools.partial(
        paged_attention.paged_attention, scale=H**-0.5, return_lse=True, implementation=KERNELS_OF[platform]
    )
    q = struct((shape.rows, N, H), jnp.bfloat16)
    kv = paged_attention.KVCache(k=pages, v=pages, k_scale=scale, v_scale=scale)
    return compile_for(attention, q, kv, struct((), jnp.int32), batch)


def compile_on_tpu(shape: KernelShape | ExpertsShape, family: str) -> dict:
    struct = functools.partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(tpus(family)[0]))
    if isinstance(shape, ExpertsShape):
        compiled = compile_experts(shape, struct)
    else:
        compiled = compile_attention(shape, struct, "tpu")
    calls = re.findall(r'custom_call_target="tpu_custom_call"', compiled.as_text() or "")
    return {"temp_bytes": compiled.memory_analysis().temp_size_in_bytes, "calls": len(calls)}


def compile_selected_attention(policy: Policy, head_dim: int, struct: Callable[..., Any]) -> Any:
    """Attention of 8 sequences of 32,768 tokens to a tenth of their pages, as each layer does it."""
    B, K, H, max_pages, page_meta = 8, 8, head_dim, 512, policy.page_meta
    pages = struct((2, B * max_pages + 1, 64, K, H), jnp.bfloat16)
    C = policy.select.max_pages(64)
    kv = paged_attention.KVCache(
        k=pages,
        v=pages,
        meta=page_meta and struct((2, pages.shape[1], K, page_meta.num_parts * page_meta.width(H)), jnp.bfloat16),
        carry=struct((2, B, K, C), jnp.int32) if policy.reselect > 1 else None,
    )
    ints = struct((B,), jnp.int32)
    table = struct((B, max_pages), jnp.int32)
    region = paged_attention.AttentionBatch(page_table=table, kv_lens=ints, slots=ints, prompt_lens=ints)

    def layer(q: Any, kv: paged_attention.KVCache, layer: Any, region: paged_attention.AttentionBatch) -> Any:
        attention = functools.partial(paged_attention.paged_attention, scale=H**-0.5, return_lse=True)
        attend = lambda rows, tables: attention(rows, kv, layer, tables)  # noqa: E731
        (out, _), after = attend_decode(policy, q, kv, layer, region, attend)
        return out, after

    return compile_for(layer, struct((B, 32, H), jnp.bfloat16), kv, struct((), jnp.int32), region, donate_argnums=1)


def selected_attention(name: str, struct: Callable[..., Any]) -> dict:
    compiled = []

    def compile_it() -> Any:
        compiled.append(compile_selected_attention(*POLICIES[name], struct))
        return compiled[0]

    found = kernels_of(compile_it)
    hlo = compiled[0].as_text()
    return found | operations(hlo) | {"loops": hlo.count(" while("), "launches": launches(hlo)}


def launches(hlo: str) -> int:
    """Kernels of a program, one after the other."""
    (entry,) = re.findall(r"^ENTRY [^\n]*\{\n(.*?)^\}", hlo, re.MULTILINE | re.DOTALL)
    return len(re.findall(r" (?:fusion|custom-call|copy|sort|scatter|while)\(", entry))


def compile_dense_layer(num_rows: int, struct: Callable[..., Any]) -> Any:
    """Of Llama-3.1-8B's shape."""
    L, D, QKV, F = 2, 4096, 6144, 14336
    shapes = dense_layer.DenseWeights(
        input_norm=(L, D), qkv=(L, QKV, D), o=(L, D, D), post_norm=(L, D), gate_up=(L, 2 * F, D), down=(L, D, F)
    )
    weights = dense_layer.DenseWeights(*(struct(shape, jnp.bfloat16) for shape in shapes))
    layer, progress = struct((), jnp.int32), struct((2,), jnp.int32)
    rows = [struct((num_rows, D), jnp.bfloat16)] * 2
    run = functools.partial(dense_layer.dense_layer, eps=1e-5, offset=0.0)
    return compile_for(run, *rows, weights, layer, progress, donate_argnums=4)


def compile_experts(shape: ExpertsShape, struct: Callable[..., Any]) -> Any:
    L, E, D, F = shape.num_layers, shape.num_here, shape.D, shape.F
    x, router = (shape.num_tokens, D), (shape.num_experts, D)
    shapes = {"x": x, "router": router, "gate_up": (L, E, 2 * F, D), "down": (L, E, D, F)}
    args = {name: struct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    args["real"] = struct(x[:1], jnp.bool_)

    def layer(args: dict[str, Any], layer: Any) -> Any:
        return moe(**args, layer=layer, top_k=shape.top_k, normalize=True, act="silu")[0]

    return compile_for(layer, args, struct((), jnp.int32))


def inside_and_outside_the_loop(hlo: str) -> tuple[str, str]:
    """The computations of a program that the loop over the layers reaches, and the others."""
    computations = dict(re.findall(r"^(?:ENTRY )?(%[\w.-]+) \([^\n]*\{\n(.*?)^\}", hlo, re.MULTILINE | re.DOTALL))

    def reached(name: str, found: set[str]) -> set[str]:
        found.add(name)
        for other in computations.keys() & set(re.findall(r"%[\w.-]+", computations[name])) - found:
            reached(other, found)
        return found

    loops = [reached(body, set()) for body in re.findall(r"body=(%[\w.-]+)", hlo)]
    (loop,) = [names for names in loops if any("mosaic_gpu" in computations[name] for name in names)]
    parts = {True: "", False: ""}
    for name, text in computations.items():
        parts[name in loop] += text
    return parts[True], parts[False]


def operations(hlo: str) -> dict:
    calls = re.findall(r'custom_call_target="mosaic_gpu.*op_name="[^"]*?([^/"]*)/[^/"]*"', hlo)
    return {
        "matmuls": hlo.count('custom_call_target="__cublas') + hlo.count(" dot("),
        "kernels": collections.Counter(calls),
        "cumulative_sums": hlo.count(" reduce-window("),
        "sorts": hlo.count(" sort("),
        "copies": len(re.findall(r" copy(-start)?\(", hlo)),
        "collectives": collections.Counter(re.findall(COLLECTIVES, hlo)),
    }


def compile_step(model, shape: StepShape, platform: str, place: Sharding, args) -> dict:
    ints = jax.ShapeDtypeStruct((shape.num_ints,), jnp.int32, sharding=place)
    step = functools.partial(forward_step, model, shape=shape)
    frontier = jax.ShapeDtypeStruct((shape.prefill_tokens, LLAMA["hidden_size"]), jnp.bfloat16, sharding=place)
    inputs = (*args, ints, frontier) if shape.starts_above else (*args, ints)
    compiled = compile_for(step, *inputs, donate_argnums=(1, 2))
    memory = compiled.memory_analysis()
    assert memory is not None
    found: dict = {"temp_bytes": memory.temp_size_in_bytes, "alias_bytes": memory.alias_size_in_bytes}
    if platform == "tpu":
        found["kernels"] = len(re.findall(r"custom_call_target=\"tpu_custom_call\"", compiled.as_text() or ""))
    if platform == "cuda" and shape.span is None:  # else there are three loops
        inside, outside = inside_and_outside_the_loop(compiled.as_text() or "")
        found |= {"in_loop": operations(inside), "outside": operations(outside)}
    return found


def compile_step_of_policy(model, shape: StepShape, place: SingleDeviceSharding, args: tuple) -> dict:
    sparse = SparseAttention(decode=Quest(budget=640, layers=(0, None), reselect=4))
    params, kv, sequences = args

    def with_state(kv: dict) -> dict:
        sizes = {"num_slots": NUM_SLOTS, "max_pages": MAX_PAGES}
        return {kind: init_state(sparse, cache, LLAMA["head_dim"], **sizes) for kind, cache in kv.items()}

    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), jax.eval_shape(with_state, kv)
    )
    model = dataclasses.replace(model, sparse=sparse)
    return compile_step(model, shape, "cuda", place, (params, shapes, sequences)) | {"cache_bytes": num_bytes(shapes)}


def more_on_tpus() -> dict:
    experts = {
        f"{family}_{name}": compile_on_tpu(shape, family)
        for family in ("v5e", "v5p", "v6e", "tpu7x")
        for name, shape in MORE_TPU_EXPERTS.items()
        if family in ("v5e", "v6e") or name in ("experts_8192", "experts_64_in_blocks")
    }
    model, devices = get_model(MIXTURE), targets("tpu")
    place = SingleDeviceSharding(devices[0])
    args = arguments(model, "tpu", place)
    programs = {"one": compile_step(model, SHAPES["decode"], "tpu", place, args)}
    for name, sizes in MESHES.items():
        mesh = Mesh(np.array(devices[:2]).reshape(sizes), AXES)
        rank_model = model.on(mesh)
        split = on_mesh(rank_model, args, mesh)
        programs[name] = compile_step(rank_model, SHAPES["decode"], "tpu", replicated(mesh), split)
    attention = {
        f"{family}_{name}": compile_on_tpu(shape, family)
        for family in ("v5e", "v5p", "tpu7x")
        for name, shape in TPU_KERNELS.items()
    }
    weights_bytes = num_bytes(args[0])
    return {"attention": attention, "experts": experts, "programs": programs, "weights_bytes": weights_bytes}


def main(platform: str) -> None:
    if platform == "tpus":
        print(json.dumps(more_on_tpus()))
        return
    model = get_model(LLAMA)
    devices = targets(platform)
    place = SingleDeviceSharding(devices[0])
    args = arguments(model, platform, place)
    result: dict = {"weights_bytes": num_bytes(args[0]), "cache_bytes": num_bytes(args[1])}
    if platform == "tpu":
        result["kernels"] = {
            f"v6e_{name}": compile_on_tpu(shape, "v6e") for name, shape in (TPU_KERNELS | TPU_EXPERTS).items()
        }
    if platform == "cuda":
        struct = functools.partial(jax.ShapeDtypeStruct, sharding=place)
        compiles = {
            name: functools.partial(compile_attention, shape, struct, "cuda") for name, shape in KERNELS.items()
        }
        compiles |= {f"dense_layer_{n}": functools.partial(compile_dense_layer, n, struct) for n in (8, 16)}
        for name, num_tokens in EXPERTS.items():
            shape = ExpertsShape(num_tokens=num_tokens, num_layers=48)
            compiles[name] = functools.partial(compile_experts, shape, struct)
        result["kernels"] = {name: kernels_of(compile_it) for name, compile_it in compiles.items()}
        result["policies"] = {name: selected_attention(name, struct) for name in POLICIES}
        result["policy_step"] = compile_step_of_policy(model, SHAPES["decode"], place, args)
    result["programs"] = {name: compile_step(model, shape, platform, place, args) for name, shape in SHAPES.items()}
    for name, sizes in MESHES.items() if platform != "cpu" else ():
        mesh = Mesh(np.array(devices[:2]).reshape(sizes), AXES)
        rank_model = model.on(mesh)
        split = on_mesh(rank_model, args, mesh)
        step = compile_step(rank_model, SHAPES["decode"], platform, replicated(mesh), split)
        result.setdefault("meshes", {})[name] = step
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
