"""From what a caller asks to what the token core runs: tokenise, fill in defaults, check everything, fan out n."""

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.core_types import CoreRequest
from jaxserve.exceptions import ParameterError, RequestError
from jaxserve.layers.limits import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, MAX_BIAS, MAX_STOP_IDS
from jaxserve.sampling_params import SamplingParams
from jaxserve.structured import check_grammar
from jaxserve.structured_params import StructuredOutputsParams
from jaxserve.tokenizer import Tokenizer

Prompt = str | Sequence[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """What the engine behind can hold."""

    vocab_size: int
    max_model_len: int
    max_logprobs: int  # -1 = the whole vocabulary


class InputProcessor:
    """Makes `CoreRequest`s. Raises before anything reaches the core, so a bad request touches no other."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        limits: RequestLimits,
        generation_config: Mapping[str, Any],
        *,
        seed: int = 0,
    ):
        self._tokenizer, self.limits = tokenizer, limits
        self._seeds = random.Random(seed)
        self._next_seq_id = 0
        self.default_sampling_params = default_sampling_params(generation_config)
        self._eos_token_ids = eos_token_ids(generation_config, tokenizer, limits.vocab_size)

    def process(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        now: float,
        priority: int = 0,
        deadline: float | None = None,
        cache_salt: str | None = None,
    ) -> list[CoreRequest]:
        """The n sequences of one request; `params=None` takes the model's defaults, `deadline` is seconds from `now`.

        Raises:
            RequestError: a prompt that is empty, or too long for one output token to fit; a grammar that does not
                compile, or for a model without a tokenizer.
            ParameterError: something that this model or engine cannot serve; the message names it.
            TypeError: a prompt that is neither text nor a list of ints, or params that are no SamplingParams.
        """
        if params is None:
            params = self.default_sampling_params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling params must be a SamplingParams or None, got {type(params).__name__}")
        prompt_token_ids = self._encode(prompt)
        self._check_params(params)
        _check_handling(priority, deadline, cache_salt)
        room = self.limits.max_model_len - len(prompt_token_ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        bad_words = self._bad_words(params)
        first_id, self._next_seq_id = self._next_seq_id, self._next_seq_id + params.n
        return [
            CoreRequest(
                seq_id=first_id + index,
                prompt_token_ids=prompt_token_ids,
                params=params.sample(
                    n=1,
                    seed=_wrap_int64(seed + index),
                    max_tokens=max_tokens,
                    min_tokens=min(params.min_tokens, max_tokens),
                    prompt_logprobs=None if index else params.prompt_logprobs,
                ),
                eos_token_ids=[] if params.ignore_eos else self._eos_token_ids,
                bad_words_token_ids=bad_words,
                priority=priority,
                arrival_time=now,
                deadline=None if deadline is None else now + deadline,
                cache_salt=cache_salt,
                leader=first_id if index else None,
            )
            for index in range(params.n)
        ]

    def _encode(self, prompt: Prompt) -> list[int]:
        limits = self.limits
        if isinstance(prompt, str):
            token_ids = self._encode_text(prompt)
        elif isinstance(prompt, list | tuple):
            token_ids = list(prompt)
        else:
            raise _no_prompt(prompt)
        if not token_ids:
            raise RequestError("the prompt is empty: it must hold at least one token")
        if len(token_ids) >= limits.max_model_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens, but max_model_len is {limits.max_model_len} and one place "
                f"is needed for output; shorten the prompt to {limits.max_model_len - 1} tokens or, where the model "
                f"was trained for more, raise max_model_len"
            )
        if not all(type(token) is int for token in token_ids):  # only now: a list that is too long is not looked at
            raise _no_prompt(prompt)
        self._check_vocabulary("prompt", token_ids)
        return token_ids

    def _encode_text(self, prompt: str) -> list[int]:
        if self._tokenizer is None:
            raise RequestError("this model has no tokenizer: give the prompt as a list of token ids")
        limit = self.limits.max_model_len
        if len(prompt) > limit and len(prompt) > limit * self._tokenizer.longest_token:  # do not even tokenise it
            raise RequestError(
                f"the prompt has {len(prompt)} characters, more than {limit - 1} tokens, which max_model_len {limit} "
                f"leaves room for, can hold; shorten it"
            )
        return self._tokenizer.encode(prompt)

    def _check_params(self, params: SamplingParams) -> None:
        limits = self.limits
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is None or limits.max_logprobs == -1:
                continue
            if count == -1 or count > limits.max_logprobs:
                raise ParameterError(name, count, f"at most max_logprobs ({limits.max_logprobs})")
        stop_ids = params.stop_token_ids or ()
        self._check_vocabulary("stop_token_ids", stop_ids)
        self._check_vocabulary("allowed_token_ids", params.allowed_token_ids or ())
        self._check_vocabulary("logit_bias", params.logit_bias or ())
        if len(stop_ids) + len(self._eos_token_ids) > MAX_STOP_IDS:
            most = MAX_STOP_IDS - len(self._eos_token_ids)
            raise ParameterError("stop_token_ids", f"{len(stop_ids)} ids", f"at most {most} ids")
        if len(params.logit_bias or ()) > MAX_BIAS:
            raise ParameterError("logit_bias", f"{len(params.logit_bias or ())} ids", f"at most {MAX_BIAS} ids")
        stops = {*stop_ids, *([] if params.ignore_eos else self._eos_token_ids)}
        if params.min_tokens and params.allowed_token_ids is not None and stops.issuperset(params.allowed_token_ids):
            raise ParameterError(
                "allowed_token_ids", params.allowed_token_ids, "more than stop ids, which min_tokens forbids at first"
            )
        if params.detokenize and params.stop and self._tokenizer is None:
            raise ParameterError("stop", params.stop, "empty: this model has no tokenizer")
        if params.structured_outputs is not None:
            self._check_form(params.structured_outputs)

    def _check_form(self, form: StructuredOutputsParams) -> None:
        if self._tokenizer is None:
            raise RequestError("structured_outputs must be None: this model has no tokenizer")
        if self._tokenizer.pieces is None:
            raise RequestError("structured_outputs must be None: not every token of this model is a piece of text")
        check_grammar(form)

    def _check_vocabulary(self, name: str, token_ids: Any) -> None:
        size = self.limits.vocab_size
        wrong = next((token for token in token_ids if not 0 <= token < size), None)
        if wrong is not None:
            raise ParameterError(name, wrong, f"token ids in the vocabulary [0, {size})")

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Token ids of each bad word, at a text's start and after a space."""
        if not params.bad_words:
            return []
        if self._tokenizer is None:
            raise ParameterError("bad_words", params.bad_words, "empty: this model has no tokenizer")
        words = {word.lstrip() for word in params.bad_words}
        too_many = ParameterError("bad_words", f"{len(params.bad_words)} words", f"at most {MAX_BAD_WORDS // 2} words")
        too_long = ParameterError("bad_words", params.bad_words, f"words of at most {MAX_BAD_WORD_LEN} tokens")
        if len(words) > MAX_BAD_WORDS:  # do not even tokenise them
            raise too_many
        if max(map(len, words)) > MAX_BAD_WORD_LEN * self._tokenizer.longest_token:
            raise too_long
        spellings = [spelling for word in sorted(words) for spelling in (word, " " + word)]
        encoded = [self._tokenizer.encode(word, add_special_tokens=False) for word in spellings]
        unique = [list(ids) for ids in dict.fromkeys(tuple(ids) for ids in encoded if ids)]
        if len(unique) > MAX_BAD_WORDS:
            raise too_many
        if max(map(len, unique)) > MAX_BAD_WORD_LEN:
            raise too_long
        return unique


def _no_prompt(prompt: object) -> TypeError:
    return TypeError(f"a prompt must be a str or a list of token ids (ints), got {type(prompt).__name__}")


def _check_handling(priority: object, deadline: object, cache_salt: object) -> None:
    """What says how a request is handled, rather than sampled."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise ParameterError("priority", priority, "an integer")
    if deadline is not None and (isinstance(deadline, bool) or not isinstance(deadline, int | float)):
        raise ParameterError("deadline", deadline, "None or a number of seconds")
    if deadline is not None and not abs(deadline) < math.inf:  # ints of any size compare
        raise ParameterError("deadline", deadline, "a finite number of seconds")
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise ParameterError("cache_salt", cache_salt, "None or a str")


def default_sampling_params(generation_config: Mapping[str, Any]) -> SamplingParams:
    """What `sampling_params=None` means for this model: its generation_config over the defaults."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    given = {name: generation_config[name] for name in names if generation_config.get(name) is not None}
    if generation_config.get("max_new_tokens") is not None:
        given["max_tokens"] = generation_config["max_new_tokens"]
    try:
        return SamplingParams(**given)
    except ParameterError as error:
        raise ValueError(f"generation_config: {error}") from error


def eos_token_ids(generation_config: Mapping[str, Any], tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
    """All ids that end a sequence: the tokenizer's own and those of generation_config.

    Raises:
        ValueError: generation_config names something that is no token of the model.
    """
    eos = generation_config.get("eos_token_id")
    ids = list(eos) if isinstance(eos, list | tuple) else [] if eos is None else [eos]
    own = None if tokenizer is None else tokenizer.eos_token_id
    found = [*([] if own is None else [own]), *ids]
    if any(type(token) is not int or not 0 <= token < vocab_size for token in found) or len(found) > MAX_STOP_IDS // 2:
        raise ValueError(
            f"generation_config's eos_token_id must be at most {MAX_STOP_IDS // 2} tokens in the vocabulary "
            f"[0, {vocab_size}), got {str(eos)[:200]}"
        )
    return list(dict.fromkeys(found))


def _wrap_int64(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
