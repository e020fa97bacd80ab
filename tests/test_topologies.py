"""The table of accelerators agrees with itself, and with the compiler's own knowledge of TPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.exceptions import ParameterError
from jaxserve.topologies import TOPOLOGIES, WITHOUT_TPU, find_topology

COMPILERS = Path(sys.prefix) / "ahead-of-time"
PROGRAM = """
import json, sys
from jax.experimental import topologies
names = json.loads(sys.argv[1])
found = {n: topologies.get_topology_desc(platform="tpu", topology_name=n).devices for n in names}
print(json.dumps({n: len(devices) for n, devices in found.items()}))
"""
ENVIRONMENT = WITHOUT_TPU | {"PYTHONPATH": str(COMPILERS)}


def test_names_people_use_are_there():
    sizes = {
        name: find_topology(name).num_devices for name in ("h200", "h200x8", "v5e-16", "v6e-8", "v5p-8", "tpu7x-8")
    }
    assert list(sizes.values()) == [1, 8, 16, 8, 4, 8]


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=lambda topology: topology.name)
def test_figures_are_in_their_units(topology):
    device = topology.device
    assert 2**33 < device.memory_bytes < 2**38
    assert 5e11 < device.bandwidth < 1e13
    assert 1e14 < device.flops < 1e16
    assert device.link_bandwidth < device.bandwidth
    assert topology.num_devices % topology.num_hosts == 0
    assert (topology.jax_name is None) == (device.platform == "gpu")
    assert device.hops(1) <= device.hops(topology.num_devices) <= topology.num_devices + device.torus_axes


def test_an_unknown_name_lists_the_known():
    with pytest.raises(ParameterError, match=r"topology must be one of h200, .*tpu7x-128, got 'h200x3'"):
        find_topology("h200x3")


@pytest.mark.skipif(not (COMPILERS / "libtpu").is_dir(), reason=f"libtpu is not in {COMPILERS}")
def test_jax_has_as_many_devices_under_its_names():
    names = {t.jax_name: t.num_devices for t in TOPOLOGIES.values() if t.jax_name}
    command = [sys.executable, "-c", PROGRAM, json.dumps(list(names))]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **ENVIRONMENT})
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == names
