"""From a model's name to parameters, tokenizer and generation defaults."""

import dataclasses
import logging
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike

from jaxserve.exceptions import WeightsError
from jaxserve.layers.decoder import stack_layers
from jaxserve.models import Model, get_model
from jaxserve.sharding.mesh import placed
from jaxserve.tokenizer import Tokenizer
from jaxserve.weights import collect, hub
from jaxserve.weights.checkpoint import Checkpoint, LeafPath, leaves_of, num_bytes, read_json
from jaxserve.weights.demo import DEMO_MODEL, demo_gguf
from jaxserve.weights.dummy import SHAPES, DummyCheckpoint
from jaxserve.weights.gguf import GGUFCheckpoint
from jaxserve.weights.orbax import OrbaxCheckpoint, is_orbax
from jaxserve.weights.progress import with_progress
from jaxserve.weights.quantize import quantized
from jaxserve.weights.safetensors import SafetensorsCheckpoint

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model that is ready to run. `tokenizer` is None where a dummy has none: such a model takes token ids only."""

    model: Model
    params: dict[str, Any]
    tokenizer: Tokenizer | None
    generation_config: dict[str, Any]
    name: str


def load(
    model_id: str,
    *,
    dtype: DTypeLike | Literal["auto"] = "auto",
    load_format: Literal["auto", "dummy"] = "auto",
    quantization: str | None = None,
    revision: str | None = None,
    tokenizer: str | None = None,
    seed: int = 0,
    stacked: bool = False,
    mesh: Mesh | None = None,
    progress: bool = True,
) -> LoadedModel:
    """Loads a model: parameters go to their devices one leaf at a time.

    Args:
      model_id: "smollm2-135m" (the demo model), a .gguf file, a Hugging Face folder or id, or a folder that `convert`
        wrote. With load_format "dummy" only the configuration is read, and names in `dummy.SHAPES` work too.
      dtype: of the parameters; "auto" = the checkpoint's own.
      quantization: "int8" holds the weights of matmuls in 8 bits (`jaxserve.layers.quantized`); None = in `dtype`.
      revision: branch, tag or commit on the hub.
      tokenizer: folder, id or .gguf file of another tokenizer.
      seed: of dummy weights.
      stacked: layers as stacks `[L_kind, ...]` (accelerators), else as a tuple of dicts (CPU).
      mesh: over which to split the parameters; None = the default device.
      progress: show a bar on stderr when it takes a while.

    Raises:
      WeightsError: the checkpoint is absent, incomplete, damaged or of another architecture than its tensors.
      ValueError: the architecture or a setting of it is not supported.
    """
    checkpoint = open_checkpoint(model_id, load_format=load_format, revision=revision, seed=seed)
    text = checkpoint.tokenizer() if tokenizer is None else open_tokenizer(tokenizer, revision=None)
    model = get_model(checkpoint.config)
    dtype = checkpoint_dtype(checkpoint.config) if dtype == "auto" else dtype
    abstract = leaves_of(model.abstract_params(dtype))
    places = leaves_of(model.placements(mesh))
    if mesh is not None:
        taken = sum(param_bytes_per_device(model, dtype, mesh).values())
        logger.info("%s: %.2f GB of weights on each of %d devices", checkpoint.name, taken / 1e9, mesh.size)
    leaves = checkpoint.leaves(model, dtype, places)
    if progress:
        total = sum(map(num_bytes, abstract.values()))
        leaves = with_progress(leaves, f"Loading {checkpoint.name}", num_items=len(abstract), total_bytes=total)
    if quantization is not None:
        leaves = quantized(leaves, quantization, tied=model.config.tie_word_embeddings)
    if stacked:
        params = collect.as_stacks(leaves, model.layer_kinds)
    else:
        params = collect.as_tuple(leaves, model.config.num_layers)
    return LoadedModel(
        model=model.on(mesh),
        params=params,
        tokenizer=text,
        generation_config=checkpoint.generation_config,
        name=checkpoint.name,
    )


def abstract_params(
    model: Model, dtype: DTypeLike, mesh: Mesh | None, *, quantization: str | None = None, stacked: bool = False
) -> dict[str, Any]:
    """The shapes and places of what `load` gives for these options, padding included."""
    places, abstract = leaves_of(model.placements(mesh)), leaves_of(model.abstract_params(dtype))

    def make() -> dict[str, Any]:
        leaves = ((path, jnp.zeros(places[path].shape(leaf), leaf.dtype)) for path, leaf in abstract.items())
        if quantization is not None:
            leaves = quantized(leaves, quantization, tied=model.config.tie_word_embeddings)
        params = collect.as_tuple(leaves, model.config.num_layers)
        return {**params, "layers": stack_layers(params["layers"], model.layer_kinds)} if stacked else params

    params = jax.eval_shape(make)
    return placed(params, model.on(mesh).param_specs(params), mesh)


def param_bytes_per_device(model: Model, dtype: DTypeLike, mesh: Mesh | AbstractMesh | None) -> dict[LeafPath, int]:
    """What each leaf of the parameters takes on each device."""
    places = leaves_of(model.placements(mesh))
    return {path: places[path].bytes_per_device(leaf) for path, leaf in leaves_of(model.abstract_params(dtype)).items()}


def open_checkpoint(
    model_id: str, *, load_format: str = "auto", revision: str | None = None, seed: int = 0
) -> Checkpoint:
    """The checkpoint behind a name, headers read."""
    if load_format == "dummy":
        return _open_dummy(model_id, revision, seed)
    if model_id == DEMO_MODEL:
        return GGUFCheckpoint(demo_gguf())
    path = Path(model_id).expanduser()
    if path.is_file():
        return GGUFCheckpoint(path)
    if not path.is_dir():
        _refuse_path(model_id)
        return SafetensorsCheckpoint(hub.download(model_id, revision=revision), name=model_id)
    return OrbaxCheckpoint(path) if is_orbax(path) else SafetensorsCheckpoint(path)


def open_tokenizer(name: str, *, revision: str | None) -> Tokenizer:
    """The tokenizer in a folder, a .gguf file, or a repository of the hub."""
    path = Path(name).expanduser()
    if name == DEMO_MODEL or path.is_file():
        return GGUFCheckpoint(demo_gguf() if name == DEMO_MODEL else path).tokenizer()
    if path.is_dir():
        return Tokenizer.from_dir(path)
    _refuse_path(name)
    return Tokenizer.from_dir(hub.download(name, revision=revision, weights=False))


def checkpoint_dtype(config: dict[str, Any]) -> jnp.dtype:
    """The dtype that the checkpoint was saved in, float32 if it does not say.

    Raises:
      WeightsError: config.json names none that is known.
    """
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in ("float32", "float16", "bfloat16", "float64"):
        raise WeightsError(f"config.json: dtype must be float32, float16, bfloat16 or float64, got {name!r}")
    return jnp.dtype(name)


def _open_dummy(model_id: str, revision: str | None, seed: int) -> DummyCheckpoint:
    if model_id in SHAPES:
        return DummyCheckpoint(model_id, SHAPES[model_id], seed=seed, tokenizer=None)
    path = Path(model_id).expanduser()
    if path.is_file():
        gguf = GGUFCheckpoint(path)
        return DummyCheckpoint(gguf.name, gguf.config, seed=seed, tokenizer=gguf.tokenizer())
    if not path.is_dir():
        _refuse_path(model_id, names=SHAPES)
        path = hub.download(model_id, revision=revision, weights=False)
    tokenizer = Tokenizer.from_dir(path) if (path / "tokenizer.json").is_file() else None
    return DummyCheckpoint(model_id, read_json(path / "config.json", required=True), seed=seed, tokenizer=tokenizer)


def _refuse_path(model_id: str, names: Any = (DEMO_MODEL,)) -> None:
    """What looks like a path, and is none, must not be sent to the hub."""
    if model_id.endswith(".gguf") or model_id.startswith((".", "/", "~")) or model_id.count("/") != 1:
        known = ", ".join(names)
        raise WeightsError(f"{model_id!r} does not exist; expected a file, a folder, an id like org/model, or {known}")
