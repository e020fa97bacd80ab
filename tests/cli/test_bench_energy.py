import json
import sys
from types import SimpleNamespace

import jax
import pytest

from jaxserve.cli.bench.energy import Energy, used


class FakeNvml:
    """Three GPUs whose counters grow by 1, 10 and 100 J a look."""

    class NVMLError(Exception):
        pass

    def __init__(self):
        self.counts = [0, 0, 0]
        self.asked = set()

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:
        return {"GPU-c": 2}[name]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        self.asked.add(handle)
        self.counts[handle] += 1000 * 10**handle
        return self.counts[handle]


@pytest.fixture
def nvml(monkeypatch):
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def use(monkeypatch, *indices: int, platform: str = "gpu"):
    devices = [SimpleNamespace(platform=platform, local_hardware_id=index) for index in indices]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)


@pytest.mark.parametrize(
    ("visible", "indices", "joules"),
    [("", (0,), 1), ("", (0, 1), 11), ("2,0", (0,), 100), ("GPU-c", (0,), 100), ("1, 2", (0, 1), 110)],
)
def test_only_the_gpus_in_use_are_counted(nvml, monkeypatch, visible, indices, joules):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    use(monkeypatch, *indices)
    assert Energy().joules() == joules


def test_without_gpus_or_counters_there_is_no_figure(nvml, monkeypatch):
    use(monkeypatch, 0, platform="cpu")
    assert Energy().joules() is None
    use(monkeypatch, 0)

    def broken(_):
        raise FakeNvml.NVMLError

    monkeypatch.setattr(nvml, "nvmlDeviceGetTotalEnergyConsumption", broken)
    assert Energy().joules() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Energy().joules() is None
    assert used(None, 10) == {}


def test_benchmarks_report_energy_a_token(run, nvml, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    use(monkeypatch, 1)
    options = ("--num-prompts", "4", "--random-input-len", "6", "--random-output-len", "4", "--json")
    for command in ("serve", "throughput"):
        code, out, _, _ = run("bench", command, "--model", "m", *options)
        result = json.loads(out)
        assert code == 0
        assert (result["gpu_energy_j"], result["gpu_energy_per_token_mj"]) == (10.0, 250.0)
