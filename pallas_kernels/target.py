"""The device that programs are made for."""

from typing import Any

import jax


def target_device() -> Any:
    """What `jax.default_device` says, be it a device of a topology that is not here; else the first device here."""
    chosen = jax.config.jax_default_device
    return chosen if hasattr(chosen, "platform") else jax.devices(chosen)[0]
