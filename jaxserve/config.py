"""What a user may set, by consumer, and how "auto" becomes numbers."""

import dataclasses
import functools
import math
import re
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxserve.exceptions import ParameterError
from jaxserve.layers import sparse
from jaxserve.layers.kv_cache import position_shape
from jaxserve.layers.sampler import init_sampling, init_sequences
from jaxserve.layers.sparse import SparseAttention
from jaxserve.layers.sparse.state import init_state
from jaxserve.models.base import ModelConfig
from jaxserve.pallas_kernels.paged_attention import KVCache
from jaxserve.scheduler.config import SchedulerConfig

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
KV_CACHE_DTYPES = {"fp8": jnp.float8_e4m3fn}
CPU_KV_CACHE_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which weights, and how to hold them."""

    model: str
    tokenizer: str | None = None  # a directory or id with another tokenizer; None = the model's own
    revision: str | None = None
    dtype: str = "auto"  # auto = bfloat16
    quantization: Literal["int8"] | None = None
    load_format: Literal["auto", "dummy"] = "auto"
    max_model_len: int | None = None  # None = what the model was trained for, or what the KV pool holds
    max_logprobs: int = 20  # -1 = the whole vocabulary
    seed: int = 0

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, ("auto", *DTYPES))
        _one_of("quantization", self.quantization, (None, "int8"))
        _one_of("load_format", self.load_format, ("auto", "dummy"))
        _at_least("max_model_len", self.max_model_len, 2)
        _at_least("max_logprobs", self.max_logprobs, -1, optional=False)

    @property
    def jax_dtype(self) -> Any:
        return DTYPES["bfloat16" if self.dtype == "auto" else self.dtype]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """The KV pool.

    On an accelerator it takes `device_memory_utilization` of what JAX may allocate, less the weights and the state of
    `max_num_seqs` slots, which has some 5 bytes a slot for each token of the vocabulary. The rest is the reserve for
    activations and logits. JAX may allocate three quarters of a GPU, unless XLA_PYTHON_CLIENT_MEM_FRACTION is set to
    more before it starts.
    """

    page_size: int | None = None  # tokens; None = 16 on CPU, 64 elsewhere
    num_pages: int | None = None  # in all, overrides what memory would allow (tests force pre-emption with it)
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"  # auto = the model's; fp8 holds twice the tokens
    kv_cache_memory_bytes: int | None = None  # of each device; None = from device_memory_utilization; 1 GiB on CPU
    device_memory_utilization: float = 0.9  # share for weights, state of slots and pool together
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        _at_least("page_size", self.page_size, 1)
        if self.page_size is not None and self.page_size & (self.page_size - 1):
            raise ParameterError("page_size", self.page_size, "a power of two")
        _at_least("num_pages", self.num_pages, 2, 2**26)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, ("auto", *KV_CACHE_DTYPES))
        _at_least("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1, 2**50)
        _flag("enable_prefix_caching", self.enable_prefix_caching)
        if not 0.0 < self.device_memory_utilization <= 1.0:
            raise ParameterError("device_memory_utilization", self.device_memory_utilization, "in (0, 1]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """How many devices share the model: the product of both sizes, the first ones that JAX finds.

    Weights are split over all of them. Tensor parallelism also splits the KV cache by heads, as far as there are KV
    heads; KV parallelism splits it by pages, so that it holds more, and long contexts are read by all devices at once.

    The devices may be those of several processes, one a host. All are started with the same options and their number;
    process 0 has the requests, and in the others an engine's constructor ends the process when process 0 has ended.
    """

    tensor_parallel_size: int = 1
    kv_parallel_size: int = 1
    coordinator_address: str | None = None  # "host:port" of process 0; auto = as jax.distributed.initialize() finds out
    num_processes: int | None = None  # with a host:port
    process_id: int | None = None  # with a host:port; 0 has the requests

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "kv_parallel_size"):
            _at_least(name, getattr(self, name), 1, 2**16, optional=False)
        address = self.coordinator_address
        if address in (None, "auto"):
            for name in ("num_processes", "process_id"):
                if getattr(self, name) is not None:
                    raise ParameterError(name, getattr(self, name), "left out without a coordinator_address host:port")
            return
        if not _is_address(address):
            raise ParameterError("coordinator_address", address, "None, auto, or host:port of process 0")
        if self.num_processes is None or self.process_id is None:
            raise ParameterError("coordinator_address", address, "given with num_processes and process_id")
        _at_least("num_processes", self.num_processes, 1, 2**16)
        _at_least("process_id", self.process_id, 0, self.num_processes - 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """Batching bounds and policy; `jaxserve.scheduler.config` says what each means."""

    max_num_seqs: int | None = None  # None = 32 on CPU, 256 elsewhere
    max_num_batched_tokens: int | None = None  # None = 512 on CPU, 8192 elsewhere
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    max_num_queued_reqs: int | None = None  # counts sequences: a request with n=2 takes two places
    max_num_queued_tokens: int | None = None
    scheduler_reserve_full_isl: bool = True
    watermark: float = 0.0
    prioritize_prefill: bool = False  # `LLM`, and with it batch jobs: True, since only the end counts there
    prefill: Literal["chunked", "layered", "auto"] = "chunked"
    target_tbt_ms: float | None = None
    prefill_order: Literal["fcfs", "shortest", "slack"] = "fcfs"

    def __post_init__(self) -> None:
        _flag("prioritize_prefill", self.prioritize_prefill)
        _at_least("max_num_seqs", self.max_num_seqs, 1, 2**14)
        _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1, 2**20)
        for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
            _at_least(name, getattr(self, name), 1)
        _one_of("prefill", self.prefill, ("chunked", "layered", "auto"))
        _one_of("prefill_order", self.prefill_order, ("fcfs", "shortest", "slack"))
        target = self.target_tbt_ms
        if target is not None and (isinstance(target, bool) or not isinstance(target, int | float) or not target > 0):
            raise ParameterError("target_tbt_ms", target, "None or a number of milliseconds above 0")
        _one_of("scheduling_policy", self.scheduling_policy, ("fcfs", "priority"))
        _at_least("long_prefill_token_threshold", self.long_prefill_token_threshold, 0, optional=False)
        _flag("enable_chunked_prefill", self.enable_chunked_prefill)
        _flag("scheduler_reserve_full_isl", self.scheduler_reserve_full_isl)
        if not isinstance(self.watermark, int | float) or not 0.0 <= self.watermark < 1.0:
            raise ParameterError("watermark", self.watermark, "in [0, 1)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuntimeOptions:
    """How steps are compiled and run."""

    async_scheduling: bool = True  # the device runs step n+1 while the host reads step n
    warm_up: Literal["background", "blocking", "off"] = "background"
    compilation_cache_dir: str | None = "~/.cache/jaxserve/xla"  # None = JAX's own setting
    otlp_traces_endpoint: str | None = None  # None = what OpenTelemetry's environment variables name, if anything
    # A policy, its name, a mapping of its fields, or JSON of that, as `jaxserve.layers.sparse.resolve` takes it
    sparse_attention: Any = None

    def __post_init__(self) -> None:
        sparse.resolve(self.sparse_attention)  # for what it raises
        _flag("async_scheduling", self.async_scheduling)
        _one_of("warm_up", self.warm_up, ("background", "blocking", "off"))
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not str(endpoint).startswith(("http://", "https://")):
            raise ParameterError("otlp_traces_endpoint", endpoint, "a URL such as http://localhost:4317")

    @property
    def sparse(self) -> SparseAttention | None:
        """What `sparse_attention` names."""
        return sparse.resolve(self.sparse_attention)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All options of one engine."""

    model: ModelOptions
    cache: CacheOptions
    parallel: ParallelOptions
    scheduler: SchedulerOptions
    runtime: RuntimeOptions

    @property
    def kv_dtype(self) -> Any:
        """What the pages of the KV cache hold."""
        return KV_CACHE_DTYPES.get(self.cache.kv_cache_dtype, self.model.jax_dtype)

    @property
    def shares_pages(self) -> bool:
        """Whether there is a prefix cache: none where sparse attention drops tokens of pages."""
        selection = self.runtime.sparse
        return self.cache.enable_prefix_caching and not (selection is not None and selection.drops)

    @classmethod
    def of(cls, model: str, **options: Any) -> "EngineConfig":
        """Sorts flat options into their groups.

        Raises:
            TypeError: an unknown option; the message lists the known ones.
            ParameterError: a value out of range.
        """
        groups: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(cls)}
        owner = {field.name: group for group, kind in groups.items() for field in dataclasses.fields(kind)}
        unknown = sorted(set(options) - set(owner))
        if unknown:
            raise TypeError(f"unknown engine options {unknown}; known: {sorted(owner)}")
        chosen = {group: {k: v for k, v in options.items() if owner[k] == group} for group in groups}
        chosen["model"]["model"] = model
        return cls(**{group: kind(**chosen[group]) for group, kind in groups.items()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """What the sizes of an engine depend on: the kind of its devices, and the memory of one."""

    platform: str
    limit_bytes: int = 0  # that JAX may allocate; on CPU of no account
    in_use_bytes: int = 0

    @property
    def on_cpu(self) -> bool:
        return self.platform == "cpu"

    @classmethod
    def here(cls) -> "DeviceMemory":
        """Of the first device of this process."""
        platform = jax.default_backend()
        if platform == "cpu":
            return cls(platform=platform)
        stats = jax.local_devices()[0].memory_stats() or {}
        return cls(
            platform=platform, limit_bytes=stats.get("bytes_limit", 0), in_use_bytes=stats.get("bytes_in_use", 0)
        )


class NoRoomError(ValueError):
    """The weights and the state of the slots leave no memory for a KV pool."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunnerConfig:
    """The numbers that shape the device's state and programs."""

    max_num_seqs: int
    max_model_len: int
    page_size: int
    num_pages: int
    max_logprobs: int
    min_decode_rows: int  # 2 on CPU: one row is a cliff for XLA's matmuls; 8 elsewhere: cuBLAS pads fewer for itself
    mixed_decode_rows: tuple[int, ...]  # B of the steps that hold prefill rows too
    prefill_tokens: tuple[int, ...]  # T, ascending
    padded_decode_rows: tuple[int, ...] = ()  # those B whose rows the largest T does without, so that B + T fits it
    kv_parallel_size: int = 1  # ranks that share the pages, each with a null page

    @property
    def max_pages(self) -> int:
        """Pages of one sequence of max_model_len."""
        return -(-self.max_model_len // self.page_size)


MAX_PREFILL_SEQS = 32


def prefill_seqs(num_tokens: int) -> int:
    """S: sequences that a prefill region of T tokens may hold; short regions hold few, for the sake of the LM head."""
    return min(MAX_PREFILL_SEQS, max(1, num_tokens // 8))


def resolve(
    config: EngineConfig, model: ModelConfig, *, params_bytes: int, device: DeviceMemory | None = None
) -> tuple[SchedulerConfig, RunnerConfig]:
    """Turns "auto" into numbers.

    Args:
        model: as one device runs it, like params_bytes.
        device: what the engine runs on; None = the devices here.

    Raises:
        NoRoomError: there is no memory for a KV pool.
        ValueError: the KV pool cannot hold one request of max_model_len; the message gives the feasible length.
    """
    device = device or DeviceMemory.here()
    on_cpu = device.on_cpu
    page_size = config.cache.page_size or (16 if on_cpu else 64)
    options, selection = config.scheduler, config.runtime.sparse
    if selection is not None:
        tp, ranks = config.parallel.tensor_parallel_size, config.parallel.kv_parallel_size
        layout = sparse.Layout(model.layer_kinds, model.num_kv_heads, tp, model.kv_head_copies, ranks)
        selection.check(page_size, layout)
        if selection.carries_over_layers and options.prefill != "chunked":
            raise ValueError(
                f"sparse attention that carries selections from layer to layer needs prompts that pass all layers in a "
                f"step: prefill must be 'chunked', got {options.prefill!r}"
            )
    budget = options.max_num_batched_tokens or (512 if on_cpu else 8192)
    max_num_seqs = options.max_num_seqs or min(budget, 32 if on_cpu else 256)
    ranks = config.parallel.kv_parallel_size
    num_pages = _num_pages(config, model, max_num_seqs, page_size, params_bytes, device)
    max_model_len = _max_model_len(config, model, num_pages - ranks, page_size)
    if not options.enable_chunked_prefill and options.max_num_batched_tokens is None:
        budget = max(budget, max_model_len)
    tokens = _prefill_buckets(16 if on_cpu else 256, budget)
    mixed = {min(rows, max_num_seqs) for rows in ((0, 16, max_num_seqs) if on_cpu else (16, 64, max_num_seqs))}
    padded = sorted({0, *(rows for rows in mixed if rows <= budget // 2)}) if budget >= 16 * MAX_PREFILL_SEQS else ()
    scheduler = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        max_prefill_seqs=prefill_seqs(tokens[-1]),
        policy=options.scheduling_policy,
        enable_chunked_prefill=options.enable_chunked_prefill,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        max_num_queued_reqs=options.max_num_queued_reqs,
        max_num_queued_tokens=options.max_num_queued_tokens,
        reserve_full_isl=options.scheduler_reserve_full_isl,
        watermark=options.watermark,
        prioritize_prefill=options.prioritize_prefill,
        prefill=options.prefill,
        target_tbt_ms=options.target_tbt_ms,
        prefill_order=options.prefill_order,
        padded_decode_rows=tuple(padded),
        share_answers=selection is None or selection.shares_answers,
        prompt_multiple=page_size if selection is not None and selection.cuts_at_pages else 1,
    )
    wanted = config.model.max_logprobs
    runner = RunnerConfig(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        page_size=page_size,
        num_pages=num_pages,
        max_logprobs=model.vocab_size if wanted == -1 else min(wanted, model.vocab_size),
        min_decode_rows=2 if on_cpu else 8,
        mixed_decode_rows=tuple(sorted(mixed)),
        prefill_tokens=tokens,
        padded_decode_rows=tuple(padded),
        kv_parallel_size=ranks,
    )
    return scheduler, runner


def kv_bytes_per_token(model: ModelConfig, dtype: DTypeLike, platform: str) -> int:
    position = position_shape(model.num_kv_heads, model.head_dim, dtype, platform)
    return 2 * model.num_layers * math.prod(position) * jnp.dtype(dtype).itemsize


def sparse_bytes(
    config: EngineConfig, model: ModelConfig, platform: str, *, page_size: int, max_num_seqs: int, max_pages: int
) -> tuple[int, int]:
    """Of what sparse attention keeps beside each page, and of what it keeps for the slots of all sequences."""
    selection = config.runtime.sparse
    if selection is None:
        return 0, 0
    position = position_shape(model.num_kv_heads, model.head_dim, config.kv_dtype, platform)
    num_layers, num_kv_heads = model.layer_kinds.count("full"), math.prod(position) // model.head_dim

    def state() -> KVCache:
        kv = KVCache.zeros(num_layers, 1, page_size, position, config.kv_dtype, num_kv_heads=num_kv_heads)
        return init_state(selection, kv, model.head_dim, num_slots=max_num_seqs + 1, max_pages=max_pages)

    kv = jax.eval_shape(state)
    of_page, of_slots = (
        sum(x.size * x.dtype.itemsize for x in leaves if x is not None) for leaves in ((kv.meta, kv.mass), (kv.carry,))
    )
    return of_page, of_slots


@functools.lru_cache(maxsize=256)  # a plan asks for the same ones again and again
def state_bytes(max_num_seqs: int, max_pages: int, vocab_size: int) -> int:
    """Of what each device keeps for the slots beside the KV pool: their page tables and what the sampler knows."""

    def state() -> tuple:
        return init_sequences(max_num_seqs, max_pages), init_sampling(max_num_seqs, vocab_size)

    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(state)))


def _prefill_buckets(smallest: int, budget: int) -> tuple[int, ...]:
    sizes = [smallest]
    while sizes[-1] < budget:
        sizes.append(2 * sizes[-1])
    return tuple(sizes)


def _num_pages(
    config: EngineConfig, model: ModelConfig, max_num_seqs: int, page_size: int, params_bytes: int, device: DeviceMemory
) -> int:
    cache, num_ranks = config.cache, config.parallel.kv_parallel_size
    if cache.num_pages is not None:
        if cache.num_pages % num_ranks or cache.num_pages < 2 * num_ranks:
            raise ValueError(
                f"num_pages must be a multiple of kv_parallel_size {num_ranks} and hold two pages for each rank, got "
                f"{cache.num_pages}; give {max(2, -(-cache.num_pages // num_ranks)) * num_ranks}"
            )
        return cache.num_pages
    sizes = {"page_size": page_size, "max_num_seqs": max_num_seqs}
    page_bytes = page_size * kv_bytes_per_token(model, config.kv_dtype, device.platform)
    page_bytes += sparse_bytes(config, model, device.platform, **sizes, max_pages=1)[0]
    budget, left_after = cache.kv_cache_memory_bytes, f"{params_bytes} bytes of weights"
    if budget is None and device.on_cpu:
        budget = CPU_KV_CACHE_BYTES
    elif budget is None:
        limit = int(device.limit_bytes * cache.device_memory_utilization)
        budget = limit - max(params_bytes, device.in_use_bytes)
        longest = config.model.max_model_len or model.max_position_embeddings
        max_pages = min(-(-longest // page_size), max(0, budget) // page_bytes * num_ranks)
        state = state_bytes(max_num_seqs, max_pages, model.vocab_size)
        state += sparse_bytes(config, model, device.platform, **sizes, max_pages=max_pages)[1]
        budget, left_after = budget - state, f"{left_after} and {state} of state for {max_num_seqs} sequences"
    if budget < 2 * page_bytes:
        raise NoRoomError(
            f"no room for a KV pool: {max(0, budget)} bytes are left after {left_after}, a page takes "
            f"{page_bytes}; raise device_memory_utilization or kv_cache_memory_bytes, or lower max_num_seqs"
        )
    return budget // page_bytes * num_ranks


def _max_model_len(config: EngineConfig, model: ModelConfig, num_usable: int, page_size: int) -> int:
    feasible = num_usable * page_size
    wanted = config.model.max_model_len
    if wanted is None:
        return min(model.max_position_embeddings, feasible)
    if wanted > model.max_position_embeddings:
        raise ValueError(
            f"max_model_len {wanted} is beyond the model's max_position_embeddings {model.max_position_embeddings}"
        )
    if wanted > feasible:
        raise ValueError(
            f"the KV pool holds {feasible} tokens ({num_usable} pages of {page_size}), less than one request of "
            f"max_model_len {wanted}; lower max_model_len to {feasible} or raise kv_cache_memory_bytes"
        )
    return wanted


def _one_of(name: str, value: object, known: tuple) -> None:
    if value not in known:
        raise ParameterError(name, value, f"one of {known}")


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ParameterError(name, value, "True or False")


def _is_address(value: object) -> bool:
    """Whether it is host:port, with an IPv6 host in brackets."""
    if not isinstance(value, str):
        return False
    found = re.fullmatch(r"(\[[0-9a-f:.]+\]|[\w.-]+):(\d{1,5})", value, re.ASCII | re.IGNORECASE)
    return found is not None and 0 < int(found[2]) < 2**16


def _at_least(name: str, value: int | None, low: int, high: int = 2**31 - 1, *, optional: bool = True) -> None:
    if value is None and optional:
        return
    none = "None or " if optional else ""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ParameterError(name, value, f"{none}an integer >= {low}")
    if value > high:
        raise ParameterError(name, value, f"{none}at most {high}")
