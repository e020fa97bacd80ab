"""`jaxserve convert`: a checkpoint of any format into an Orbax one."""

from pathlib import Path

import jax.numpy as jnp

from jaxserve.exceptions import ParameterError
from jaxserve.models import get_model
from jaxserve.weights.checkpoint import leaves_of, num_bytes
from jaxserve.weights.loader import checkpoint_dtype, open_checkpoint
from jaxserve.weights.orbax import save
from jaxserve.weights.progress import with_progress

DTYPES = ("auto", "bfloat16", "float16", "float32")


def convert(src: str, dst: str | Path, *, dtype: str = "auto", revision: str | None = None) -> Path:
    """Writes the model `src` (anything that `load` takes) to the new folder `dst`, which `load` takes too.

    The host holds one layer at a time.

    Args:
      dtype: of the written weights, one of `DTYPES`; "auto" = the checkpoint's own.

    Raises:
      ParameterError: another dtype.
      WeightsError: `src` is not a whole model, or `dst` exists.
    """
    if dtype not in DTYPES:
        raise ParameterError("dtype", dtype, f"one of {DTYPES}")
    checkpoint = open_checkpoint(src, revision=revision)
    model = get_model(checkpoint.config)
    target = checkpoint_dtype(checkpoint.config) if dtype == "auto" else jnp.dtype(dtype)
    abstract = leaves_of(model.abstract_params(target))
    leaves = with_progress(
        checkpoint.leaves(model, target, leaves_of(model.placements(None))),
        f"Converting {checkpoint.name}",
        num_items=len(abstract),
        total_bytes=sum(map(num_bytes, abstract.values())),
    )
    folder = Path(dst).expanduser()
    save(leaves, checkpoint, folder)
    return folder
