"""The programs of an engine, compiled for TPUs that are not here.

How this works: libtpu describes the devices of a topology without having them, and compiles for them. The sizes, the
shapes of weights, cache and slots, the keys of the programs and the functions that are compiled come from the engine's
own code (`config.resolve`, `device.state_shapes`, `program_set`, `StepBuilder`). Nothing is allocated, and no weights
are read.
"""

import dataclasses
import fnmatch
import logging
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from jaxserve.config import DeviceMemory, EngineConfig, RunnerConfig, resolve
from jaxserve.device import state_shapes
from jaxserve.executables import compiled, serialized
from jaxserve.models import get_model
from jaxserve.pallas_kernels.fallback import say_once
from jaxserve.program_set import beside_decodes, cohorts_ahead, default_programs, span_shapes
from jaxserve.program_work import work_of
from jaxserve.scheduler import LayeredPrefill, SchedulerConfig, prefill_policy
from jaxserve.sharding.mesh import bytes_per_device, make_mesh
from jaxserve.step_builder import Rows, StepBuilder
from jaxserve.step_programs import SampleShape, StepShape
from jaxserve.topologies import GiB, Topology, check_devices
from jaxserve.weights.loader import abstract_params, open_checkpoint

VMEM = "1"  # as a memory space
KERNEL_MEMORY = re.compile(r'"tpu_custom_call".*"used_scoped_memory_configs":\[(.*?)\]')


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramReport:
    """One program, by what each device has of it. Where it does not compile there are no figures but a problem."""

    name: str
    compile_s: float
    argument_bytes: int | None = None  # of HBM, like all without another memory in their name
    temp_bytes: int | None = None
    output_bytes: int | None = None  # those beside what is written over arguments
    code_bytes: int | None = None
    needed_bytes: int | None = None  # while it runs: its own, and all else that the engine holds
    vmem_bytes: int | None = None  # of the kernel with most; None = it has no kernels
    smem_bytes: int | None = None  # of the scalars that the kernel with most of them is given
    flops: int | None = None  # of matmuls outside kernels, one trip of loops whose trips only a step knows
    matmul_bytes: int | None = None  # that these matmuls read and write
    problem: str | None = None


class EnginePrograms:
    """The programs that an engine with these options uses on a topology, by name: `decode_64` and so on.

    Raises:
        NoRoomError: weights and slots leave no memory for a KV pool.
        ValueError: options that do not fit the model or the topology.
    """

    def __init__(self, config: EngineConfig, topology: Topology):
        parallel, options = config.parallel, config.model
        _check_split(topology, parallel.kv_parallel_size, parallel.tensor_parallel_size)
        self.topology, self._notes = topology, _Notes()
        whole = get_model(open_checkpoint(options.model, load_format="dummy", revision=options.revision).config)
        assert topology.jax_name is not None, "not of TPUs"
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology.jax_name).devices
        mesh = make_mesh(parallel.kv_parallel_size, parallel.tensor_parallel_size, devices)
        whole = dataclasses.replace(whole, sparse=config.runtime.sparse)
        self._device, model = devices[0], whole.on(mesh)
        with jax.default_device(self._device):
            params = abstract_params(whole, options.jax_dtype, mesh, quantization=options.quantization, stacked=True)
            self.weights_bytes = _num_bytes(params)
            memory = DeviceMemory(platform="tpu", limit_bytes=topology.device.memory_bytes)
            scheduler, self.sizes = resolve(config, model.config, params_bytes=self.weights_bytes, device=memory)
            state = state_shapes(model, params, self.sizes, config.kv_dtype)
        carried = [kv.carry for kv in state.kv.values()]
        self.state_bytes = _num_bytes((state.sequences, state.sampling, carried))
        self.pool_bytes = _num_bytes(state.kv) - _num_bytes(carried)
        self._build = StepBuilder(model, state, max_logprobs=self.sizes.max_logprobs)
        keys = default_programs(self.sizes, every=True)
        keys["forward"] += _layered(scheduler, self.sizes, model.config.num_layers)
        self._keys = {name_of(table, key): (table, key) for table in keys for key in keys[table]}

    def total_bytes(self, reports: Sequence[ProgramReport]) -> int:
        """What a device needs at most with the code of all these programs on it."""
        code = sum(report.code_bytes or 0 for report in reports)
        needs = (report.needed_bytes - (report.code_bytes or 0) for report in reports if report.needed_bytes)
        return max(needs, default=self.held_bytes) + code

    @property
    def notes(self) -> list[str]:
        """What the programs do in a slower way than a TPU could, and why."""
        return self._notes.found

    @property
    def held_bytes(self) -> int:
        """Of each device, whatever program runs."""
        return self.weights_bytes + self.pool_bytes + self.state_bytes

    def names(self, patterns: Sequence[str] = ()) -> list[str]:
        """Those that a pattern selects; all without one. `decode` is `decode_*`.

        Raises:
            ValueError: a pattern that selects nothing.
        """
        chosen: set[str] = set()
        for pattern in patterns:
            found = {n for n in self._keys if fnmatch.fnmatchcase(n, pattern) or n.startswith(f"{pattern}_")}
            if not found:
                kinds = dict.fromkeys(re.sub(r"_\d.*", "", name) for name in self._keys)
                raise ValueError(f"no program is called {pattern!r}; give one of {', '.join(kinds)}, or a full name")
            chosen |= found
        return [name for name in self._keys if name in chosen or not patterns]

    def compile(self, name: str) -> tuple[ProgramReport, Any]:
        """What became of a program, and the executable; None where it does not compile."""
        table, key = self._keys[name]
        start, traced = time.monotonic(), []

        def trace_and_compile(function: Any, *arguments: Any, **static: Any) -> Any:
            traced.append(function.trace(*arguments, **static))
            return compiled(function, *arguments, **static)

        with jax.default_device(self._device), self._notes:
            try:
                program: Any = getattr(self._build, table)(key, trace_and_compile)
            except jax.errors.JaxRuntimeError as error:
                return ProgramReport(name=name, compile_s=time.monotonic() - start, problem=_reason(error)), None
        elapsed, work = time.monotonic() - start, work_of(traced[0].jaxpr.jaxpr)
        report = ProgramReport(
            name=name,
            compile_s=elapsed,
            **_memory(program),
            smem_bytes=work.smem_bytes or None,
            flops=work.flops,
            matmul_bytes=work.matmul_bytes,
        )
        return self._judged(report), program

    def _judged(self, report: ProgramReport) -> ProgramReport:
        """With what the device needs while it runs: arguments may be padded, and not all of the state is among them."""
        assert report.argument_bytes is not None
        own = (report.temp_bytes or 0) + (report.output_bytes or 0) + (report.code_bytes or 0)
        needed, limit = max(self.held_bytes, report.argument_bytes) + own, self.topology.device.memory_bytes
        problem = None
        if needed > limit:
            problem = (
                f"needs {needed / GiB:.2f} GiB of HBM with all that the engine holds, a device has {limit / GiB:.2f}; "
                "lower device_memory_utilization"
            )
        return dataclasses.replace(report, needed_bytes=needed, problem=problem)


class _Notes(logging.Handler):
    """Takes, inside `with`, what kernels log of their fallbacks."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._logger = logging.getLogger("jaxserve.pallas_kernels")

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())

    def __enter__(self) -> None:
        say_once.cache_clear()
        self._logger.addHandler(self)

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)


def save_program(folder: Path, name: str, program: Any) -> dict[str, Any]:
    """Writes the serialised program; returns its file and the arguments that it takes, those of all devices together.

    The file is what `executables` keeps: a pickle of `jax.experimental.serialize_executable.serialize`.
    """
    (folder / f"{name}.program").write_bytes(serialized(program))
    return {"file": f"{name}.program", "arguments": [_described(leaf) for leaf in jax.tree.leaves(program.args_info)]}


def _described(leaf: Any) -> str:
    """Such as "donated bfloat16[32,1536,4096]"."""
    return f"{'donated ' if leaf.donated else ''}{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def name_of(table: str, key: Any) -> str:
    """What people call the program of this key."""
    match key:
        case StepShape(prefill_tokens=0):
            parts: tuple = ("decode", key.decode_rows)
        case StepShape(span=None):
            parts = ("mixed", key.decode_rows, key.prefill_tokens)
        case StepShape():
            assert key.span is not None
            parts = ("layered", key.decode_rows, key.prefill_tokens, *key.span)
        case SampleShape():
            features = key.features
            parts = (table, key.rows, "any" if features.edits else "random" if features.random else "greedy")
        case Rows():
            parts = (table, key.count)
        case _:
            raise AssertionError(key)
    return "_".join(map(str, parts))


def _layered(scheduler: SchedulerConfig, sizes: RunnerConfig, num_layers: int) -> list[StepShape]:
    """Those of cohorts, as far as they are known before steps were timed."""
    policy = prefill_policy(scheduler, num_layers, lambda num_tokens, num_seqs, spans: None)
    if not isinstance(policy, LayeredPrefill):
        return []
    whole = default_programs(sizes, every=False)["forward"]
    ahead = [span_shapes(whole, size, 1, spans, num_layers=num_layers) for size, spans in cohorts_ahead(policy, sizes)]
    return beside_decodes(dict.fromkeys(shape for shapes in ahead for shape in shapes), sizes)


def _check_split(topology: Topology, kv: int, tp: int) -> None:
    check_devices(topology, kv, tp)
    if not topology.can_run(kv * tp):
        raise ValueError(
            f"an engine uses up to {topology.devices_a_host} devices of one host of {topology.name}, or all "
            f"{topology.num_devices}, got kv_parallel_size {kv} x tensor_parallel_size {tp} = {kv * tp}"
        )


def _num_bytes(shapes: Any) -> int:
    """Of each device."""
    return sum(bytes_per_device(leaf.shape, leaf.dtype, leaf.sharding) for leaf in jax.tree.leaves(shapes))


def _memory(program: Any) -> dict[str, Any]:
    memory = program.memory_analysis()
    kernels = KERNEL_MEMORY.findall(program.as_text() or "")
    vmem = [int(n) for used in kernels for n in re.findall(rf'"memory_space":"{VMEM}".*?"size":"(\d+)"', used)]
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
        "vmem_bytes": max(vmem, default=None),
    }


def _reason(error: Exception) -> str:
    """What a compiler says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:400]
