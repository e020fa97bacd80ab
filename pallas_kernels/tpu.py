"""The TPU that kernels are made for, in numbers."""

from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels.target import target_device


def chip() -> pltpu.TpuInfo:
    """Of one core: its vector memory, the bandwidth of its share of the HBM. A v5e where kernels are interpreted."""
    if target_device().platform == "tpu":
        return pltpu.get_tpu_info()
    return pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V5E, 1)
