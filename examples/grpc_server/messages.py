"""Between the messages of generation.proto and what jaxserve takes and gives."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import generation_pb2 as pb

from jaxserve import CompletionOutput, Logprob, ParameterError, RequestOutput, RequestOutputKind, SamplingParams

MAX_N = 128  # each sample is a sequence of its own, with its own copy of the prompt on the way to the engine
MAX_REQUEST_ID_CHARS = 256  # every response repeats it
PROMPT_LOGPROBS_A_MESSAGE = 256  # positions; so that no message outgrows a client's default limit of 4 MiB


def request_id_of(request: pb.GenerateRequest) -> str | None:
    """None where the server shall make one up."""
    if len(request.request_id) > MAX_REQUEST_ID_CHARS:
        raise ParameterError("request_id", request.request_id, f"at most {MAX_REQUEST_ID_CHARS} characters")
    return request.request_id or None


def prompt_of(request: pb.GenerateRequest) -> str | list[int]:
    """Raises ValueError when neither form of prompt is set."""
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "token_ids":
            return list(request.token_ids.ids)
        case _:
            raise ValueError("prompt must be set: give text or token_ids")


def params_of(request: pb.GenerateRequest, defaults: SamplingParams) -> SamplingParams:
    """`defaults`, overridden by the fields that are set.

    Raises:
        ParameterError: a field is out of range.
    """
    options: dict[str, Any] = {}
    for field, value in request.sampling_params.ListFields():
        if field.name == "structured_outputs":
            options[field.name] = form_of(value)
        elif field.name == "logit_bias":
            options[field.name] = dict(value)
        else:
            options[field.name] = list(value) if field.is_repeated else value
    if options.get("n", 1) > MAX_N:
        raise ParameterError("n", options["n"], f"an integer in [1, {MAX_N}]")
    whole = request.HasField("stream") and not request.stream
    kind = RequestOutputKind.FINAL_ONLY if whole else RequestOutputKind.DELTA
    return dataclasses.replace(defaults, **options, output_kind=kind)


def form_of(message: pb.StructuredOutputs) -> dict[str, Any]:
    """The value of `SamplingParams.structured_outputs`.

    Raises:
        ValueError: no constraint is set, or json_object to false.
    """
    kind = message.WhichOneof("constraint")
    if kind is None:
        raise ValueError("structured_outputs must hold json_schema, regex, choice, grammar or json_object, got none")
    if kind == "json_object" and not message.json_object:
        raise ValueError("structured_outputs.json_object must be true, got false; leave structured_outputs out")
    if kind == "choice":
        return {kind: list(message.choice.choices)}
    return {"json" if kind == "json_schema" else kind: getattr(message, kind)}


def params_message(params: SamplingParams) -> pb.SamplingParams:
    """What of `params` the protocol can say, defaults included."""
    names = [field.name for field in pb.SamplingParams.DESCRIPTOR.fields]
    values = {name: getattr(params, name, None) for name in names}
    return pb.SamplingParams(**{name: value for name, value in values.items() if value not in (None, ())})


def responses(output: RequestOutput, num_tokens: dict[int, int]) -> Iterator[pb.GenerateResponse]:
    """What to send of one output. `num_tokens` counts the tokens of each sample so far; this adds the new ones."""
    request_id = output.request_id
    for part in prompt_logprobs_messages(output.prompt_logprobs or ()):
        yield pb.GenerateResponse(request_id=request_id, prompt_logprobs=part)
    for sample in output.outputs:
        if sample.text or sample.token_ids:
            delta = pb.Delta(index=sample.index, text=sample.text, token_ids=sample.token_ids)
            if sample.logprobs:
                delta.logprobs.extend(map(logprobs_message, sample.logprobs))
            num_tokens[sample.index] = num_tokens.get(sample.index, 0) + len(sample.token_ids)
            yield pb.GenerateResponse(request_id=request_id, delta=delta)
        if sample.finish_reason is not None:
            completion = completion_message(output, sample, num_tokens.get(sample.index, 0))
            yield pb.GenerateResponse(request_id=request_id, completion=completion)


def completion_message(output: RequestOutput, sample: CompletionOutput, num_tokens: int) -> pb.Completion:
    completion = pb.Completion(
        index=sample.index,
        finish_reason=sample.finish_reason,
        num_prompt_tokens=len(output.prompt_token_ids),
        num_completion_tokens=num_tokens,
        num_cached_tokens=output.num_cached_tokens,
        cumulative_logprob=sample.cumulative_logprob,
    )
    if isinstance(sample.stop_reason, str):
        completion.stop_string = sample.stop_reason
    elif sample.stop_reason is not None:
        completion.stop_token_id = sample.stop_reason
    return completion


def prompt_logprobs_messages(positions: Any) -> Iterator[pb.PromptLogprobs]:
    for start in range(0, len(positions), PROMPT_LOGPROBS_A_MESSAGE):
        some = positions[start : start + PROMPT_LOGPROBS_A_MESSAGE]
        yield pb.PromptLogprobs(start=start, positions=[logprobs_message(position or {}) for position in some])


def logprobs_message(candidates: dict[int, Logprob]) -> pb.Logprobs:
    found = candidates.values()
    return pb.Logprobs(
        token_ids=candidates,
        logprobs=[candidate.logprob for candidate in found],
        ranks=[candidate.rank for candidate in found],
        tokens=[candidate.decoded_token or "" for candidate in found],
    )
