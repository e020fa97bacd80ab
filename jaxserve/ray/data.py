"""Batch inference in Ray Data: a stage of `AsyncLLM` actors that fills in what each row asks for."""

import asyncio
import dataclasses
import hashlib
import os
import uuid
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from ray.data import ActorPoolStrategy, Dataset

from jaxserve.async_engine import AsyncLLM
from jaxserve.exceptions import COSTS_ITS_ROW, EngineDeadError, ParameterError, RequestError, why_refused
from jaxserve.outputs import RequestOutput
from jaxserve.sampling_params import RequestOutputKind, SamplingParams

_ADDED = {
    "generated_text": pa.string(),
    "generated_tokens": pa.list_(pa.int32()),
    "num_input_tokens": pa.int32(),
    "finish_reason": pa.string(),
    "error": pa.string(),
}
_WITHOUT_COLUMN = ("logprobs", "prompt_logprobs", "output_kind")  # parameters whose effect no column shows
MAX_TASK_RETRIES = 3  # of a batch, or a row that kills its engine would kill engines for ever


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
    starts another, and the batches that it had not handed over run again, at most three times; then the dataset fails.
    A row without a seed gets one made of the row itself, so that it draws the same tokens then. Rows that are equal in
    all columns draw the same, too: give them seeds, or ids.

    Args:
        sampling_params: fields of `SamplingParams`; the rest are the model's defaults. n must be 1, and logprobs have
            no column. A mistake here ends the dataset when its first replica starts.
        batch_size: rows in a batch; a replica works on four batches at once.
        resources: what Ray is to reserve for a replica, as in `ray.remote`: `{"num_gpus": 1}`,
            `{"resources": {"TPU": 4}}`; other options of it, such as `max_task_retries`, may stand there.
        options: those of `LLM`.
    """
    return dataset.map_batches(
        Generate,
        fn_constructor_args=(model, dict(sampling_params or {}), options),
        batch_size=batch_size,
        batch_format="pyarrow",
        compute=ActorPoolStrategy(size=replicas),
        **{"max_task_retries": MAX_TASK_RETRIES, **(resources or {})},
    )


class Generate:
    """One replica of the stage: pyarrow tables in, the same tables with the columns of `_ADDED` out."""

    def __init__(self, model: str, sampling_params: dict[str, Any], options: dict[str, Any]):
        self._llm = AsyncLLM(model, **options)
        self._sampling_params = sampling_params
        self._params({})  # or a mistake would cost every row

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
            row = _without_nulls(row)
            params = self._params(row.get("sampling_params", {}))
            if params.seed is None:
                params = dataclasses.replace(params, seed=row_seed(row))
            output = await self._run(await self._prompt(row), params)
        except EngineDeadError:
            raise
        except COSTS_ITS_ROW as error:
            return {"error": why_refused(error)}
        sample = output.outputs[0]
        if sample.finish_reason == "error":
            return {"error": str(sample.stop_reason)}
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
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)

    def _params(self, own: dict[str, Any]) -> SamplingParams:
        fields = {**self._sampling_params, **own}
        for name in _WITHOUT_COLUMN:
            if fields.get(name) is not None:
                raise ParameterError(name, fields[name], "left out in a dataset, which gets no column for it")
        fields["output_kind"] = RequestOutputKind.FINAL_ONLY
        params = SamplingParams.of(**{**vars(self._llm.get_default_sampling_params()), **fields})
        if params.n != 1:
            raise ParameterError("n", params.n, "1 in a dataset: repeat the row instead")
        return params


def row_seed(row: dict[str, Any]) -> int:
    """The seed of a row that names none: the same whenever and wherever the row runs."""
    return int.from_bytes(hashlib.blake2b(repr(row).encode(errors="replace"), digest_size=8).digest()) >> 2


def _without_nulls(value: Any) -> Any:
    """Arrow gives every dict of a column the keys of all, at every depth, with None where there was nothing."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value
