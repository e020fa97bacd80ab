"""`jaxserve convert`: a checkpoint of any format into an Orbax one."""

from pathlib import Path
from typing import Literal

from jax.typing import DTypeLike

from jaxserve.models import get_model
from jaxserve.weights.checkpoint import leaves_of, num_bytes
from jaxserve.weights.loader import checkpoint_dtype, open_checkpoint
from jaxserve.weights.orbax import save
from jaxserve.weights.progress import with_progress


def convert(
    src: str, dst: str | Path, *, dtype: DTypeLike | Literal["auto"] = "auto", revision: str | None = None
) -> Path:
    """Writes the model `src` (anything that `load` takes) to the new folder `dst`, which `load` takes too.

    The host holds one layer at a time.

    Raises:
      WeightsError: `src` is not a whole model, or `dst` exists.
    """
    checkpoint = open_checkpoint(src, revision=revision)
    model = get_model(checkpoint.config)
    dtype = checkpoint_dtype(checkpoint.config) if dtype == "auto" else dtype
    abstract = leaves_of(model.abstract_params(dtype))
    leaves = with_progress(
        checkpoint.leaves(model, dtype, dict.fromkeys(abstract)),
        f"Converting {checkpoint.name}",
        num_items=len(abstract),
        total_bytes=sum(map(num_bytes, abstract.values())),
    )
    folder = Path(dst).expanduser()
    save(leaves, checkpoint, folder)
    return folder
