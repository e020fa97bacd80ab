"""Requests and responses in OpenAI's names, with vLLM's additions. /openapi.json is made from these.

A field that is no part of a struct is refused by name. `null` means the same as a field that is left out.
"""

import dataclasses
from typing import Any, Literal

import msgspec

from jaxserve.sampling_params import SamplingParams


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`include_usage`: one more chunk at the end, without choices, that counts the tokens."""

    include_usage: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The form of the text, as OpenAI says it: `json_schema` is `{"name": ..., "schema": {...}}`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The form of the text, as vLLM says it: the fields of `jaxserve.StructuredOutputsParams`."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class Ignored(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's fields that say who asks, how it is billed or kept: any value is taken, and none changes an answer."""

    user: Any = None
    safety_identifier: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None


class GenerationRequest(Ignored, kw_only=True, forbid_unknown_fields=True):
    """What both kinds of requests take. Sampling fields have the meaning and default of `jaxserve.SamplingParams`, and
    the model's own defaults where it has any."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int | None = None
    cache_salt: str | None = None

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None


SAMPLING_FIELDS = tuple(
    field.name for field in dataclasses.fields(SamplingParams) if field.name in GenerationRequest.__struct_fields__
)


class CompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """`prompt`: a text, several texts, token ids, or several lists of token ids."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: Literal[False] | None = None


class TextPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A piece of a message."""

    text: str


class ChatMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One turn, as the model's chat template reads it. The fields from `refusal` on come in answers of OpenAI's client
    that are sent back; templates get them, too."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None


class ChatCompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """`tools` goes to the chat template; what the model calls comes back as text. `max_completion_tokens` goes before
    `max_tokens`; without either an answer may fill the context."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Any = None  # means nothing while calls are text
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


# ------------------------------------------------------------------------------------------------------- responses


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    """Tokens whose keys and values were in the prefix cache."""

    cached_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True):
    """Token counts over all prompts and samples of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails = msgspec.field(default_factory=PromptTokensDetails)


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """One entry a token in each list; `text_offset` counts the characters of `tokens` before it."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """`finish_reason`: stop, length or abort; `stop_reason`: the stop string or stop token id that was met."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class Completion(msgspec.Struct, kw_only=True):
    """The answer of /v1/completions. Choice i belongs to prompt i // n."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class TokenLogprob(msgspec.Struct, kw_only=True):
    """A token and its UTF-8 bytes, which need not be whole characters."""

    token: str
    logprob: float
    bytes: list[int]


class PositionLogprobs(TokenLogprob, kw_only=True):
    """The token that was taken, and the likeliest ones at its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """One entry a token."""

    content: list[PositionLogprobs]


class AssistantMessage(msgspec.Struct, kw_only=True):
    """What the model said."""

    role: str = "assistant"
    content: str


class ChatChoice(msgspec.Struct, kw_only=True):
    """As `CompletionChoice`."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The answer of /v1/chat/completions."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ModelCard(msgspec.Struct, kw_only=True):
    """The model that is served. `max_model_len`: tokens of prompt and answer together."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "jaxserve"
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    """All models, which is one."""

    object: str = "list"
    data: list[ModelCard]


class Status(msgspec.Struct, kw_only=True):
    """How the server is."""

    status: str


class Version(msgspec.Struct, kw_only=True):
    """Of jaxserve."""

    version: str
