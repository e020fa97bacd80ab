"""/v1/completions: text that goes on from a prompt."""

from collections import defaultdict
from collections.abc import Sequence

from jaxserve.async_engine import AsyncLLM
from jaxserve.input_processor import Prompt
from jaxserve.outputs import CompletionOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.server import logprobs, prompts
from jaxserve.server.answer import Answer, check, check_size, encode, sampling_params
from jaxserve.server.protocol import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest


class CompletionAnswer(Answer):
    """`text_completion`, whole or in chunks of the same form."""

    id_prefix = "cmpl"
    chunk_object = "text_completion"

    def __init__(self, request: CompletionRequest, model: str, prompts: Sequence[Prompt], params: SamplingParams):
        super().__init__(request, model, prompts, params)
        self._offsets: defaultdict[int, int] = defaultdict(int)  # characters of tokens so far, by choice

    @classmethod
    async def of(cls, request: CompletionRequest, llm: AsyncLLM, model: str) -> "CompletionAnswer":
        """Raises ApiError, ParameterError or RequestError for a request that cannot be served."""
        check(request, model)
        params = sampling_params(request, llm, logprobs=request.logprobs)
        found = await prompts.of_completion(request.prompt, llm)
        check_size(len(found), params)
        return cls(request, model, found, params)

    def body(self, samples: Sequence[CompletionOutput]) -> Completion:
        choices = [
            CompletionChoice(
                index=index,
                text=sample.text,
                logprobs=self._logprobs(index, sample),
                finish_reason=sample.finish_reason,
                stop_reason=sample.stop_reason,
            )
            for index, sample in enumerate(samples)
        ]
        return Completion(id=self.id, created=self.created, model=self.model, choices=choices, usage=self.usage)

    def delta(self, choice: int, sample: CompletionOutput) -> bytes:
        if not sample.finished and sample.logprobs is None:
            if not sample.text:
                return b""
            return self.event(choice, b'"text":%b,"logprobs":null,"finish_reason":null' % encode(sample.text))
        fields = b'"text":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b' % (
            encode(sample.text),
            encode(self._logprobs(choice, sample)),
            encode(sample.finish_reason),
            encode(sample.stop_reason),
        )
        return self.event(choice, fields)

    def _logprobs(self, choice: int, sample: CompletionOutput) -> CompletionLogprobs | None:
        if sample.logprobs is None:
            return None
        found = logprobs.of_completion(sample, self._offsets[choice])
        self._offsets[choice] += sum(map(len, found.tokens))
        return found
