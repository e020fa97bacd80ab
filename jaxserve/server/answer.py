"""What the answers of both endpoints have in common: the request's parameters, the count of tokens, the stream."""

import abc
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any, ClassVar

import msgspec

from jaxserve.async_engine import AsyncLLM
from jaxserve.exceptions import ParameterError
from jaxserve.input_processor import Prompt
from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.sampling_params import (
    RequestOutputKind,
    SamplingParams,
    structured_outputs_of,
)
from jaxserve.server.errors import ApiError, bad_request
from jaxserve.server.protocol import SAMPLING_FIELDS, GenerationRequest, Usage
from jaxserve.server.service import Outputs

MAX_N = 128  # samples of one prompt, as at OpenAI
MAX_SEQUENCES = 4096  # of one request: prompts x n
MAX_ALLOWED_IDS = 1 << 22  # of one request: each sequence brings its own to the engine

encode = msgspec.json.Encoder().encode


class Answer(abc.ABC):
    """One request, understood, and the words for what the engine says to it.

    A chunk is written from parts that are encoded once a request, since a server writes thousands of them a second:
    only what differs is encoded for each.
    """

    id_prefix: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, request: GenerationRequest, model: str, prompts: Sequence[Prompt], params: SamplingParams):
        self.prompts, self.params = prompts, params
        self.stream = bool(request.stream)
        self.priority, self.cache_salt = request.priority or 0, request.cache_salt
        self.id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self.created, self.model = int(time.time()), model
        self.usage = Usage()
        self._include_usage = request.stream_options is not None and bool(request.stream_options.include_usage)
        head = {"id": self.id, "object": self.chunk_object, "created": self.created, "model": model}
        self._head = b"data: " + encode(head)[:-1] + b',"choices":['

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    @abc.abstractmethod
    def body(self, samples: Sequence[CompletionOutput]) -> Any:
        """The whole answer, of one sample a choice."""

    @abc.abstractmethod
    def delta(self, choice: int, sample: CompletionOutput) -> bytes:
        """Events for what is new in a choice; none when that is nothing to show."""

    def opening(self) -> bytes:
        """Events before the first delta."""
        return b""

    def event(self, choice: int, fields: bytes) -> bytes:
        """One chunk of one choice; `fields` is the rest of its JSON."""
        return b'%b{"index":%d,%b}]}\n\n' % (self._head, choice, fields)

    async def collect(self, outputs: Outputs) -> bytes:
        """The body of an answer that is not streamed."""
        samples: dict[int, CompletionOutput] = {}
        async for prompt, output in outputs:
            self._count(output)
            samples |= {self._choice(prompt, sample): sample for sample in output.outputs}
        return encode(self.body([samples[choice] for choice in range(self.num_choices)]))

    async def events(self, outputs: Outputs) -> AsyncGenerator[bytes]:
        """The stream: what each output adds, in one write."""
        before = self.opening()
        async for prompt, output in outputs:
            self._count(output)
            new = b"".join([self.delta(self._choice(prompt, sample), sample) for sample in output.outputs])
            if new or before:
                yield before + new
                before = b""
        if self._include_usage:
            yield b'%b],"usage":%b}\n\n' % (self._head, encode(self.usage))

    def _choice(self, prompt: int, sample: CompletionOutput) -> int:
        return prompt * self.params.n + sample.index

    def _count(self, output: RequestOutput) -> None:
        for sample in output.outputs:
            self.usage.completion_tokens += len(sample.token_ids)
        if output.finished:
            self.usage.prompt_tokens += len(output.prompt_token_ids)
            self.usage.prompt_tokens_details.cached_tokens += output.num_cached_tokens
            self.usage.total_tokens = self.usage.prompt_tokens + self.usage.completion_tokens


def check(request: GenerationRequest, model: str) -> None:
    """What must hold before any work is done for a request.

    Raises:
        ApiError: 404, another model; 400, options that contradict each other.
    """
    if request.model not in (None, model):
        message = f"the model {request.model!r} does not exist; this server has {model!r}"
        raise ApiError(404, message, code="model_not_found", param="model")
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options needs stream to be true", "stream_options")


def sampling_params(request: GenerationRequest, llm: AsyncLLM, **fixed: Any) -> SamplingParams:
    """The model's defaults, overridden by what the request gives, and then by `fixed`.

    Raises:
        ApiError, ParameterError: a field is out of range, or not supported.
    """
    if request.n is not None and request.n > MAX_N:
        raise ParameterError("n", request.n, f"at most {MAX_N}")
    given = _given(request, SAMPLING_FIELDS)
    kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    theirs, ours = (field and _given(field) for field in (request.response_format, request.structured_outputs))
    form = structured_outputs_of(theirs, ours)
    options = given | {"structured_outputs": form} | fixed | {"output_kind": kind}
    return dataclasses.replace(llm.get_default_sampling_params(), **options)


def _given(request: msgspec.Struct, names: Sequence[str] = ()) -> dict[str, Any]:
    """What the request says of these fields, or of all."""
    return {name: value for name in names or request.__struct_fields__ if (value := getattr(request, name)) is not None}


def check_size(num_prompts: int, params: SamplingParams) -> None:
    """Raises ApiError, 400, for more sequences than one request may have, or more ids that each of them brings."""
    n, ids = params.n, len(params.allowed_token_ids or ())
    if num_prompts * n > MAX_SEQUENCES:
        raise bad_request(f"prompts x n must be at most {MAX_SEQUENCES}, got {num_prompts} x {n}", "n")
    if num_prompts * n * ids > MAX_ALLOWED_IDS:
        message = f"prompts x n x allowed_token_ids must be at most {MAX_ALLOWED_IDS}, got {num_prompts} x {n} x {ids}"
        raise bad_request(message, "allowed_token_ids")
