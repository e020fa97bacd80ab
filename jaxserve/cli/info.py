"""`jaxserve info`: versions, devices, and what a model asks of them."""

import dataclasses
import importlib.metadata
import platform
from typing import Annotated, Any

import typer

from jaxserve.cli.output import show

PACKAGES = ("jaxserve", "jax", "jaxlib", "flax", "numpy")
LOAD_FORMATS = ("auto", "dummy")


def info(
    model: Annotated[str | None, typer.Option(help="Also show this model's shape and memory.")] = None,
    load_format: Annotated[
        str, typer.Option(help="dummy knows shapes without weights, such as llama-3.1-8b.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show versions and devices. With --model, also what the model is and how much memory it takes."""
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"--load-format must be {' or '.join(LOAD_FORMATS)}, got {load_format!r}")
    import jax

    result: dict[str, Any] = {
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in PACKAGES},
        "devices": {str(device.id): describe(device) for device in jax.local_devices()},
    }
    if model is not None:
        result["model"] = describe_model(model, load_format)
    show(result, "jaxserve", as_json=as_json)


def describe(device: Any) -> str:
    """`cpu`, or `NVIDIA H200 (gpu), 139.8 GiB`."""
    memory = (device.memory_stats() or {}).get("bytes_limit") if device.platform != "cpu" else None
    text = device.platform if device.device_kind == device.platform else f"{device.device_kind} ({device.platform})"
    return f"{text}, {memory / 2**30:.1f} GiB" if memory else text


def describe_model(name: str, load_format: str) -> dict[str, Any]:
    """The shape of a model and the bytes that it takes in bfloat16, from its header alone."""
    import jax
    import jax.numpy as jnp

    from jaxserve.config import kv_bytes_per_token
    from jaxserve.models import get_model
    from jaxserve.weights.loader import open_checkpoint

    model = get_model(open_checkpoint(name, load_format=load_format).config)
    leaves = jax.tree.leaves(model.abstract_params(jnp.bfloat16))
    config = {k: v for k, v in dataclasses.asdict(model.config).items() if isinstance(v, str | int | float) and v}
    return {
        **config,
        "num_params": sum(leaf.size for leaf in leaves),
        "weights_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in leaves),
        "kv_bytes_per_token": kv_bytes_per_token(model.config, "bfloat16", jax.default_backend()),
    }
