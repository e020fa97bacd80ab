"""The accelerators that people name, as numbers: what a device holds, reads, computes and sends.

All figures are of one device as JAX counts them: a chip, but half a chip of TPU7x. Names are those of Google Cloud for
TPUs (v5p-8 and tpu7x-8 count TensorCores, two a chip; others count chips), and `h200x8` for GPUs of one host.

Sources:
- TPU: the tables of cloud.google.com/tpu/docs/{v5e,v6e,v5p,tpu7x}: bf16 peak, HBM bandwidth, half of the bidirectional
  ICI bandwidth. `memory_bytes` is what libtpu 0.0.50 says a program may use when one is too large for it (15.75, 31.24,
  95.73 and 94.74 GiB); JAX's names and the numbers of devices are checked against it by
  `tests/test_topologies.py`. A hop of the torus takes about a microsecond (jax-ml.github.io/scaling-book, "How to think
  about TPUs").
- GPU: NVIDIA's data sheets of H200 SXM and H100 SXM: dense bf16 peak, HBM bandwidth, half of NVLink's 900 GB/s.
  `memory_bytes` is what CUDA reports. The times of small collectives are XLA's between two H200s inside a compiled loop
  (all-reduce 22 us, all-to-all 23 to 33 us); those of more GPUs were not measured.
"""

import dataclasses
from typing import Literal

from jaxserve.exceptions import ParameterError

GiB = 1 << 30

# What libtpu and JAX must find in the environment, when they are loaded, to compile where there is no TPU
WITHOUT_TPU = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to ask
    "TPU_WORKER_ID": "0",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no TPU is taken
    "TPU_LOG_DIR": "disabled",
    "TPU_ACCELERATOR_TYPE": "v6e-1",  # any will do, and none is complained about: the topology is named later
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One device. Bandwidths are bytes a second, and of data sheets: what is reached is less."""

    name: str
    platform: Literal["gpu", "tpu"]
    memory_bytes: int  # as its runtime reports it
    bandwidth: float  # of its memory
    flops: float  # a second, bfloat16
    link_bandwidth: float  # to all its neighbours together, one way
    all_reduce_s: float  # of a few bytes; on a torus for each hop
    all_to_all_s: float
    torus_axes: int = 0  # 0 = all devices are one hop apart

    def hops(self, num_devices: int) -> float:
        """Along all axes of a cubic torus of so many devices, one after the other."""
        return self.torus_axes * num_devices ** (1 / self.torus_axes) if self.torus_axes else 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """Devices that are connected."""

    name: str
    device: Device
    num_devices: int
    num_hosts: int
    jax_name: str | None = None  # of TPUs, for `jax.experimental.topologies`

    @property
    def devices_a_host(self) -> int:
        return self.num_devices // self.num_hosts

    def can_run(self, size: int) -> bool:
        """Whether an engine can use so many of the devices: any number of one host's, or those of all hosts."""
        return size <= self.devices_a_host or size == self.num_devices


def _tpu(name: str, *, gib: float, bandwidth: float, tflops: float, link: float, axes: int) -> Device:
    return Device(
        name=name,
        platform="tpu",
        memory_bytes=int(gib * GiB),
        bandwidth=bandwidth * 1e9,
        flops=tflops * 1e12,
        link_bandwidth=link * 1e9,
        all_reduce_s=1e-6,
        all_to_all_s=1e-6,
        torus_axes=axes,
    )


def _gpu(name: str, *, gib: float, bandwidth: float) -> Device:
    return Device(
        name=name,
        platform="gpu",
        memory_bytes=int(gib * GiB),
        bandwidth=bandwidth * 1e9,
        flops=989e12,
        link_bandwidth=450e9,
        all_reduce_s=22e-6,
        all_to_all_s=28e-6,
    )


H200 = _gpu("NVIDIA H200", gib=139.8, bandwidth=4800)
H100 = _gpu("NVIDIA H100", gib=79.1, bandwidth=3350)
V5E = _tpu("TPU v5e", gib=15.75, bandwidth=819, tflops=197, link=200, axes=2)
V6E = _tpu("TPU v6e", gib=31.24, bandwidth=1638, tflops=918, link=400, axes=2)
V5P = _tpu("TPU v5p", gib=95.73, bandwidth=2765, tflops=459, link=600, axes=3)
TPU7X = _tpu("half a TPU7x", gib=94.74, bandwidth=3690, tflops=1153, link=300, axes=3)

SQUARES = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
CUBES = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4"}  # chips


def _all() -> list[Topology]:
    found = []
    for family, device in (("h200", H200), ("h100", H100)):
        for n in (1, 2, 4, 8):
            name = family if n == 1 else f"{family}x{n}"
            found.append(Topology(name=name, device=device, num_devices=n, num_hosts=1))
    for family, device in (("v5e", V5E), ("v6e", V6E)):
        for n, shape in SQUARES.items():
            hosts = 1 if n <= 8 else n // 4  # hosts of up to 8 chips alone, of 4 in a larger slice
            found.append(
                Topology(
                    name=f"{family}-{n}", device=device, num_devices=n, num_hosts=hosts, jax_name=f"{family}:{shape}"
                )
            )
    for family, device, devices_a_chip in (("v5p", V5P, 1), ("tpu7x", TPU7X, 2)):
        for chips, shape in CUBES.items():
            found.append(
                Topology(
                    name=f"{family}-{2 * chips}",
                    device=device,
                    num_devices=devices_a_chip * chips,
                    num_hosts=chips // 4,
                    jax_name=f"{family}:{shape}",
                )
            )
    return found


TOPOLOGIES = {topology.name: topology for topology in _all()}


def find_topology(name: str) -> Topology:
    """The topology of this name.

    Raises:
        ParameterError: there is none; the message lists those that there are.
    """
    if name not in TOPOLOGIES:
        raise ParameterError("topology", name, f"one of {', '.join(TOPOLOGIES)}")
    return TOPOLOGIES[name]


def check_devices(topology: Topology, kv_parallel_size: int, tensor_parallel_size: int) -> None:
    """Raises ValueError where the topology has fewer devices than the product of the sizes."""
    size = kv_parallel_size * tensor_parallel_size
    if size > topology.num_devices:
        raise ValueError(
            f"kv_parallel_size {kv_parallel_size} x tensor_parallel_size {tensor_parallel_size} needs {size} devices, "
            f"{topology.name} has {topology.num_devices}; lower one of them or take a larger topology"
        )
