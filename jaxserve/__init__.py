"""jaxserve: LLM serving written once, in JAX. `from jaxserve import LLM, SamplingParams`."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.async_engine import AsyncLLM as AsyncLLM
    from jaxserve.engine import LLMEngine as LLMEngine
    from jaxserve.exceptions import (
        EngineDeadError as EngineDeadError,
        JaxserveError as JaxserveError,
        ParameterError as ParameterError,
        QueueFullError as QueueFullError,
        RequestError as RequestError,
        WeightsError as WeightsError,
    )
    from jaxserve.llm import LLM as LLM
    from jaxserve.outputs import (
        CompletionOutput as CompletionOutput,
        Logprob as Logprob,
        RequestMetrics as RequestMetrics,
        RequestOutput as RequestOutput,
    )
    from jaxserve.sampling_params import RequestOutputKind as RequestOutputKind, SamplingParams as SamplingParams
    from jaxserve.structured_params import StructuredOutputsParams as StructuredOutputsParams

__version__ = "0.1.0"

_WHERE = {
    "LLM": "llm",
    "LLMEngine": "engine",
    "AsyncLLM": "async_engine",
    "SamplingParams": "sampling_params",
    "RequestOutputKind": "sampling_params",
    "StructuredOutputsParams": "structured_params",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "RequestMetrics": "outputs",
    "Logprob": "outputs",
    "JaxserveError": "exceptions",
    "ParameterError": "exceptions",
    "RequestError": "exceptions",
    "QueueFullError": "exceptions",
    "EngineDeadError": "exceptions",
    "WeightsError": "exceptions",
}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:  # lazy: importing jaxserve.scheduler must not import jax
    if name not in _WHERE:
        raise AttributeError(f"module 'jaxserve' has no attribute {name!r}; it exports {', '.join(__all__)}")
    return getattr(importlib.import_module(f"jaxserve.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
