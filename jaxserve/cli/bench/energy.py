"""The energy that GPUs take during a run, from NVML's counters; nothing where there are none."""

import os
from types import ModuleType
from typing import Any


class Energy:
    """Joules of all GPUs that jax uses here, since it was made; None without an NVIDIA GPU or nvidia-ml-py."""

    def __init__(self) -> None:
        self._nvml, self._handles = _gpus()
        self._began = self._millijoules()

    def joules(self) -> float | None:
        if self._began is None:
            return None
        now = self._millijoules()
        return None if now is None else (now - self._began) / 1e3

    def _millijoules(self) -> float | None:
        if self._nvml is None or not self._handles:
            return None
        try:
            return float(sum(self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in self._handles))
        except self._nvml.NVMLError:  # cards before Volta do not count
            return None


def used(joules: float | None, num_tokens: int) -> dict[str, float]:
    """The fields of a benchmark's result."""
    if joules is None or not num_tokens:
        return {}
    return {"gpu_energy_j": joules, "gpu_energy_per_token_mj": 1e3 * joules / num_tokens}


def _gpus() -> tuple[ModuleType | None, list[Any]]:
    import jax

    indices = [device.local_hardware_id for device in jax.local_devices() if device.platform == "gpu"]
    if not indices:
        return None, []
    try:
        import pynvml
    except ImportError:
        return None, []
    try:
        pynvml.nvmlInit()
        return pynvml, [_handle(pynvml, index) for index in indices]
    except pynvml.NVMLError:
        return None, []


def _handle(nvml: ModuleType, index: int) -> Any:
    """Of CUDA's device `index`, which CUDA_VISIBLE_DEVICES may have chosen by number or by name."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    name = visible[index].strip() if index < len(visible) else ""
    if name and not name.isdigit():
        return nvml.nvmlDeviceGetHandleByUUID(name)
    return nvml.nvmlDeviceGetHandleByIndex(int(name) if name else index)
