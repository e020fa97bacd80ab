"""What a program computes, read off its trace: of one device where it runs on a mesh."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple


class Work(NamedTuple):
    flops: int = 0  # of matmuls outside kernels
    matmul_bytes: int = 0  # that these read and write
    smem_bytes: int = 0  # of the scalars that the kernel with most of them is given

    def __add__(self, other: "Work") -> "Work":  # pyright: ignore[reportIncompatibleMethodOverride]
        return Work(
            self.flops + other.flops,
            self.matmul_bytes + other.matmul_bytes,
            max(self.smem_bytes, other.smem_bytes),
        )

    def times(self, count: int) -> "Work":
        return Work(count * self.flops, count * self.matmul_bytes, self.smem_bytes)


def work_of(jaxpr: Any) -> Work:
    """The work of a jaxpr; of a loop whose trips only a run knows, that of one trip, and of branches the larger."""
    total = Work()
    for eqn in jaxpr.eqns:
        name, inner = eqn.primitive.name, [work_of(other) for other in _jaxprs(eqn)]
        if name == "dot_general":
            total += _matmul(eqn)
        elif name == "pallas_call":
            scalars = eqn.invars[: eqn.params["grid_mapping"].num_index_operands]
            total += Work(smem_bytes=sum(_num_bytes(var.aval) for var in scalars))
        elif name == "cond":
            total += Work(*map(max, zip(*inner, strict=True)))
        else:
            times = eqn.params["length"] if name == "scan" else 1
            total += sum(inner, Work()).times(times)
    return total


def _jaxprs(eqn: Any) -> Iterator[Any]:
    if eqn.primitive.name == "pallas_call":
        return
    for value in eqn.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            jaxpr = getattr(part, "jaxpr", part)  # a closed one holds it
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


def _matmul(eqn: Any) -> Work:
    (out,), (left, right) = eqn.outvars, eqn.invars
    (contracted, _), _ = eqn.params["dimension_numbers"]
    depth = math.prod(left.aval.shape[i] for i in contracted)
    moved = sum(_num_bytes(var.aval) for var in (left, right, out))
    return Work(2 * math.prod(out.aval.shape) * depth, moved)


def _num_bytes(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize
