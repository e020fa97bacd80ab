"""What crosses between the text side of the engine and its token core: plain msgspec structs, one list a step."""

import msgspec

from jaxserve.sampling_params import SamplingParams


class CoreRequest(msgspec.Struct, kw_only=True, array_like=True):
    """One sequence to generate. Of a request with n > 1 there are n of these; `leader` names the first."""

    seq_id: int
    prompt_token_ids: list[int]
    params: SamplingParams  # already resolved: max_tokens and seed are numbers
    eos_token_ids: list[int]
    bad_words_token_ids: list[list[int]] = []
    priority: int = 0
    arrival_time: float = 0.0
    deadline: float | None = None
    cache_salt: str | None = None
    leader: int | None = None


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Raw logprobs at one position: the token itself first, then the top k, most likely first."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # of token_ids[0], 1 = most likely


class CoreOutput(msgspec.Struct, kw_only=True, array_like=True, gc=False):
    """What one step changed for one sequence."""

    seq_id: int
    new_token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None  # one a new token
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # complete, once, with the first token
    num_cached_tokens: int = 0
    first_scheduled_time: float | None = None
    num_preemptions: int = 0
