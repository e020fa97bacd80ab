"""Batch inference in Ray Data: a stage of `AsyncLLM` actors that fills in what each row asks for."""

import asyncio
import dataclasses
import os
import uuid
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from ray.data import ActorPoolStrategy, Dataset

from jaxserve.async_engine import AsyncLLM
from jaxserve.exceptions import EngineDeadError, ParameterError, RequestError
from jaxserve.outputs import RequestOutput
from jaxserve.sampling_params import RequestOutputKind, SamplingParams

_ADDED = {
    "generated_text": pa.string(),
    "generated_tokens": pa.list_(pa.int32()),
    "num_input_tokens": pa.int32(),
    "finish_reason": pa.string(),
    "error": pa.string(),
}


def generate(
    dataset: Dataset,
    model: str,
    *,
    replicas: int = 1,
    sampling_params: Mapping[str, Any] | None = None,
    batch_size: int = 256,
    resources: Mapping[str, Any] | None = None,
    **options: Any,
) -> Dataset:
    """Adds the model's answers to a dataset, by `replicas` engines side by side.

    A row has a `prompt` (text or token ids) or `messages`; it may have `sampling_params`, a dict that overrides the
    stage's. It comes back with `generated_text`, `generated_tokens`, `num_input_tokens`, `finish_reason`, and `error`:
    None, or why this row could not be served, with the others None then. When a replica or its engine dies, Ray
    starts another, and the rows that it had not handed over run again.

    Args:
        sampling_params: fields of `SamplingParams`; the rest are the model's defaults. n must be 1.
        batch_size: rows in a batch; a replica works on four batches at once.
        resources: what Ray is to reserve for a replica, as in `ray.remote`: `{"num_gpus": 1}`,
            `{"resources": {"TPU": 4}}`.
        options: those of `LLM`.
    """
    return dataset.map_batches(
        Generate,
        fn_constructor_args=(model, dict(sampling_params or {}), options),
        batch_size=batch_size,
        batch_format="pyarrow",
        compute=ActorPoolStrategy(size=replicas),
        **(resources or {}),
    )


class Generate:
    """One replica of the stage: pyarrow tables in, the same tables with the columns of `_ADDED` out."""

    def __init__(self, model: str, sampling_params: dict[str, Any], options: dict[str, Any]):
        self._llm = AsyncLLM(model, **options)
        self._sampling_params = sampling_params

    async def __call__(self, rows: pa.Table):
        try:
            answers = await asyncio.gather(*map(self._answer, rows.to_pylist()))
        except EngineDeadError:
            os._exit(1)  # Ray replaces the actor, engine and all, and gives its rows to the next
        for name, kind in _ADDED.items():
            rows = rows.append_column(name, pa.array([answer.get(name) for answer in answers], kind))
        yield rows

    async def _answer(self, row: dict[str, Any]) -> dict[str, Any]:
        try:
            params = self._params(row.get("sampling_params"))
            output = await self._run(await self._prompt(row), params)
        except (RequestError, ValueError, TypeError, NotImplementedError) as error:
            return {"error": str(error)}
        sample = output.outputs[0]
        return {
            "generated_text": sample.text,
            "generated_tokens": sample.token_ids,
            "num_input_tokens": len(output.prompt_token_ids),
            "finish_reason": sample.finish_reason,
        }

    async def _run(self, prompt: str | list[int], params: SamplingParams) -> RequestOutput:
        async for output in self._llm.generate(prompt, params, uuid.uuid4().hex):
            if output.finished:
                return output
        raise AssertionError("generate ends with a finished output")

    async def _prompt(self, row: dict[str, Any]) -> str | list[int]:
        prompt, messages = row.get("prompt"), row.get("messages")
        if (prompt is None) == (messages is None):
            raise RequestError(f"a row needs either prompt or messages, and has {', '.join(map(repr, row))}")
        if messages is None:
            return prompt
        tokenizer = await self._llm.get_tokenizer()
        messages = [_without_nulls(message) for message in messages]
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)

    def _params(self, own: dict[str, Any] | None) -> SamplingParams:
        fields = {**self._sampling_params, **_without_nulls(own or {}), "output_kind": RequestOutputKind.FINAL_ONLY}
        params = dataclasses.replace(self._llm.get_default_sampling_params(), **fields)
        if params.n != 1:
            raise ParameterError("n", params.n, "1 in a dataset: repeat the row instead")
        return params


def _without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    """Arrow gives every dict of a column the keys of all, with None where there was nothing."""
    return {name: value for name, value in fields.items() if value is not None}
