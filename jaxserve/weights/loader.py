"""From a model's name to parameters, tokenizer and generation defaults."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxserve.models import Model, get_model
from jaxserve.tokenizer import Tokenizer
from jaxserve.weights.assemble import Quantize, assemble
from jaxserve.weights.demo import DEMO_MODEL, demo_gguf
from jaxserve.weights.progress import bar, no_progress
from jaxserve.weights.source import Source


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
    revision: str | None = None,
    stacked: bool = False,
    shardings: Callable[[Model], Any] | None = None,
    quantize: Quantize | None = None,
    progress: bool = True,
) -> LoadedModel:
    source = open_source(model_id, revision=revision)
    model = _model(source)
    wrap = bar(f"Loading {source.name}") if progress else no_progress
    params = assemble(
        source,
        model,
        resolve_dtype(source.config, dtype),
        stacked=stacked,
        shardings=None if shardings is None else shardings(model),
        quantize=quantize,
        progress=wrap,
    )
    return LoadedModel(
        model=model,
        params=params,
        tokenizer=source.tokenizer(),
        generation_config=source.generation_config,
        name=source.name,
    )


def open_source(model_id: str, *, revision: str | None = None) -> Source:
    from jaxserve.weights.gguf import GGUFSource

    if model_id == DEMO_MODEL:
        return GGUFSource(demo_gguf())
    return GGUFSource(Path(model_id))


def _model(source: Source) -> Model:
    return get_model(source.config)


def resolve_dtype(config: dict[str, Any], dtype: DTypeLike | Literal["auto"]) -> jnp.dtype:
    return (
        jnp.dtype(config.get("dtype") or config.get("torch_dtype") or "float32")
        if dtype == "auto"
        else jnp.dtype(dtype)
    )
