"""/v1/chat/completions: the next turn of a conversation."""

from collections.abc import Sequence

from jaxserve.async_engine import AsyncLLM
from jaxserve.exceptions import ParameterError
from jaxserve.input_processor import Prompt
from jaxserve.outputs import CompletionOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.server import logprobs, prompts
from jaxserve.server.answer import Answer, check, check_size, encode, sampling_params
from jaxserve.server.errors import bad_request
from jaxserve.server.protocol import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionRequest,
    ChatLogprobs,
)
from jaxserve.tokenizer import Tokenizer


class ChatAnswer(Answer):
    """`chat.completion`, or `chat.completion.chunk`s: one with the role, those with text, one with the end."""

    id_prefix = "chatcmpl"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        request: ChatCompletionRequest,
        model: str,
        prompt: Prompt,
        params: SamplingParams,
        tokenizer: Tokenizer,
    ):
        super().__init__(request, model, [prompt], params)
        self._tokenizer = tokenizer

    @classmethod
    async def of(cls, request: ChatCompletionRequest, llm: AsyncLLM, model: str) -> "ChatAnswer":
        """Raises ApiError, ParameterError or RequestError for a request that cannot be served."""
        check(request, model)
        params = sampling_params(request, llm, max_tokens=_limit(request), logprobs=_num_logprobs(request, llm))
        check_size(1, params)
        prompt = await prompts.of_chat(request, llm)
        return cls(request, model, prompt, params, await llm.get_tokenizer())

    def body(self, samples: Sequence[CompletionOutput]) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=index,
                message=AssistantMessage(content=sample.text),
                logprobs=self._logprobs(sample),
                finish_reason=sample.finish_reason,
                stop_reason=sample.stop_reason,
            )
            for index, sample in enumerate(samples)
        ]
        return ChatCompletion(id=self.id, created=self.created, model=self.model, choices=choices, usage=self.usage)

    def opening(self) -> bytes:
        fields = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return b"".join([self.event(choice, fields) for choice in range(self.num_choices)])

    def delta(self, choice: int, sample: CompletionOutput) -> bytes:
        events = b""
        if sample.text or sample.logprobs:
            found = b"null" if sample.logprobs is None else encode(self._logprobs(sample))
            fields = b'"delta":{"content":%b},"logprobs":%b,"finish_reason":null' % (encode(sample.text), found)
            events = self.event(choice, fields)
        if sample.finished:
            reasons = encode(sample.finish_reason), encode(sample.stop_reason)
            events += self.event(choice, b'"delta":{},"logprobs":null,"finish_reason":%b,"stop_reason":%b' % reasons)
        return events

    def _logprobs(self, sample: CompletionOutput) -> ChatLogprobs | None:
        if sample.logprobs is None:
            return None
        return logprobs.of_chat(sample, self.params.logprobs or 0, self._tokenizer)


def _limit(request: ChatCompletionRequest) -> int | None:
    limit = request.max_completion_tokens
    if limit is None:
        return request.max_tokens
    if limit < 1:
        raise ParameterError("max_completion_tokens", limit, "at least 1")
    return limit


def _num_logprobs(request: ChatCompletionRequest, llm: AsyncLLM) -> int | None:
    num_top, most = request.top_logprobs, llm.limits.max_logprobs
    if num_top is not None and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    if num_top is not None and num_top < 0:
        raise ParameterError("top_logprobs", num_top, "at least 0")
    if num_top is not None and num_top > most != -1:
        raise ParameterError("top_logprobs", num_top, f"at most max_logprobs ({most})")
    return (num_top or 0) if request.logprobs else None
