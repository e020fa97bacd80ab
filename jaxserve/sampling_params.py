"""How to sample one request: vLLM's names, defaults and ranges."""

import copy
import dataclasses
import difflib
import enum
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.exceptions import ParameterError
from jaxserve.structured_params import (
    StructuredOutputsParams as StructuredOutputsParams,
    structured_outputs_of as structured_outputs_of,
)

MAX_N = 16384
MAX_STOP_STRINGS, MAX_STOP_CHARS = 64, 8192
MAX_LISTED = 4096  # entries of a list or mapping; what a model can hold of each is less
MAX_ALLOWED_TOKEN_IDS = 1 << 20  # more than any vocabulary
FLAGS = (
    "include_stop_str_in_output",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
# Names that vLLM knows and this version does not serve yet; each says so instead of being dropped in silence.
NOT_YET = (
    "logprob_token_ids",
    "prompt_logprob_start",
    "prompt_logprob_token_ids",
    "flat_logprobs",
    "thinking_token_budget",
    "repetition_detection",
    "trace_decode_token_ids",
    "watermarking",
    "truncate_prompt_tokens",
    "skip_reading_prefix_cache",
    "stream_interval",
)


class RequestOutputKind(enum.Enum):
    """What each `RequestOutput` of a stream holds."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # only what is new
    FINAL_ONLY = 2  # one output, at the end


def _refuses_what_is_not_served_yet[T: type](cls: T) -> T:
    """Makes the constructor say so when it meets a name of `NOT_YET`; other unknown names stay a TypeError."""
    init = cls.__init__

    @functools.wraps(init)
    def checked(self: Any, **options: Any) -> None:
        for name in options:
            if name in NOT_YET:
                raise NotImplementedError(f"{name} is not supported yet; leave it out")
        init(self, **options)

    cls.__init__ = checked  # pyright: ignore[reportAttributeAccessIssue]
    return cls


@_refuses_what_is_not_served_yet
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling options of one request.

    temperature 0 is greedy; `top_k` 0 or -1 and `top_p` 1 are off; `max_tokens` None means up to `max_model_len`.
    With `seed`, sample i of n equals a lone run with `seed + i`, whatever else is in the batch.

    Raises:
        ParameterError: a field is out of range (`parameter` and `value` are on the error).
        NotImplementedError: a known option of vLLM that is not served yet.
        TypeError: an unknown option.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    structured_outputs: StructuredOutputsParams | None = None  # a mapping of its options is taken, too
    extra_args: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        self._normalise()
        self._check_ranges()
        self._check_lists()

    def _normalise(self) -> None:
        def put(name: str, value: object) -> None:  # the one place where a frozen field is written
            object.__setattr__(self, name, value)

        put("stop", (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop, MAX_LISTED))
        for name in ("stop_token_ids", "bad_words"):
            put(name, _as_tuple(name, getattr(self, name), MAX_LISTED))
        if self.allowed_token_ids is not None:
            put("allowed_token_ids", _as_tuple("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS))
        if self.structured_outputs is not None:
            put("structured_outputs", StructuredOutputsParams.of(self.structured_outputs))
        if self.logit_bias is not None:
            put("logit_bias", _as_bias(self.logit_bias))
        if self.top_k == -1:
            put("top_k", 0)
        if self.seed == -1:
            put("seed", None)
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            if isinstance(getattr(self, name), float):
                put(name, float(getattr(self, name)))  # numpy's floats are floats, but no message packs them
        if isinstance(self.temperature, int | float) and 0.0 < self.temperature < 0.01:
            put("temperature", 0.01)

    def _check_ranges(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        _number("temperature", self.temperature, 0.0, 2.0, "in [0, 2]")
        _number("top_p", self.top_p, 0.0, 1.0, "in (0, 1]")
        if self.top_p == 0.0:
            raise ParameterError("top_p", self.top_p, "in (0, 1]")
        _integer("top_k", self.top_k, 0, 2**31 - 1)
        _number("min_p", self.min_p, 0.0, 1.0, "in [0, 1]")
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0, "in [-2, 2]")
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "in [-2, 2]")
        _number("repetition_penalty", self.repetition_penalty, 1e-4, 1e4, "in [0.0001, 10000]")
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), -1)
        if self.temperature == 0.0 and self.n > 1:
            raise ParameterError("n", self.n, "1 when temperature is 0 (greedy samples would all be the same)")
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ParameterError(name, getattr(self, name), "True or False")
        if self.extra_args is not None and not isinstance(self.extra_args, Mapping):
            raise ParameterError("extra_args", self.extra_args, "None or a mapping")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise ParameterError("output_kind", self.output_kind, "a RequestOutputKind")

    def _check_lists(self) -> None:
        stop, bad_words = self.stop or (), self.bad_words or ()
        if any(not isinstance(text, str) or not text for text in stop):
            raise ParameterError("stop", list(stop), "made of non-empty strings")
        if len(stop) > MAX_STOP_STRINGS or sum(map(len, stop)) > MAX_STOP_CHARS:
            given = f"{len(stop)} strings of {sum(map(len, stop))} characters"
            raise ParameterError(
                "stop", given, f"at most {MAX_STOP_STRINGS} strings of {MAX_STOP_CHARS} characters in all"
            )
        if stop and not self.detokenize:
            raise ParameterError("stop", list(stop), "empty when detokenize is False")
        for token in self.stop_token_ids or ():
            _integer("stop_token_ids", token, 0)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise ParameterError("allowed_token_ids", [], "None or a non-empty list")
            for token in self.allowed_token_ids:
                _integer("allowed_token_ids", token, 0)
        if any(not isinstance(word, str) or not word.strip() for word in bad_words):
            raise ParameterError("bad_words", list(bad_words), "made of non-empty strings")

    @classmethod
    def of(cls, **options: Any) -> "SamplingParams":
        """`SamplingParams(**options)` for options that come from outside (JSON, a proto): every name is checked.

        Raises:
            NotImplementedError: an option of vLLM that jaxserve does not serve yet.
            ParameterError: an unknown option, or a value out of range.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        for name, value in options.items():
            if name not in known and name not in NOT_YET:
                close = difflib.get_close_matches(name, sorted(known), n=1)
                hint = f"did you mean {close[0]}?" if close else "see jaxserve.SamplingParams"
                raise ParameterError(name, value, f"left out: it is no sampling parameter ({hint})")
        return cls(**options)

    def sample(self, **fields: Any) -> "SamplingParams":
        """A copy for one sample of a request: `fields` are in range, and the rest was checked before."""
        copied = copy.copy(self)
        for name, value in fields.items():
            object.__setattr__(copied, name, value)
        return copied

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _as_tuple(name: str, given: object, most: int) -> tuple:
    if given is None:
        return ()
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ParameterError(name, given, "a list")
    if len(given) > most:  # before anything is done with each
        raise ParameterError(name, f"{len(given)} entries", f"at most {most} entries")
    return tuple(given)


def _as_bias(given: object) -> dict[int, float]:
    """Token id -> bias within +-100; JSON's string keys are taken as ids."""
    if not isinstance(given, Mapping):
        raise ParameterError("logit_bias", given, "a mapping of token ids to numbers")
    if len(given) > MAX_LISTED:
        raise ParameterError("logit_bias", f"{len(given)} entries", f"at most {MAX_LISTED} entries")
    bias = {}
    for token, value in given.items():
        if isinstance(token, str) and token.isdecimal() and len(token) < 20:  # int() refuses thousands of digits
            token = int(token)
        _integer("logit_bias", token, 0)
        _number("logit_bias", value, -1e38, 1e38, "finite numbers")
        bias[token] = min(100.0, max(-100.0, float(value)))
    return bias


def _integer(name: str, value: object, low: int, high: int | None = None) -> None:
    expected = f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise ParameterError(name, value, expected)


def _number(name: str, value: object, low: float, high: float, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ParameterError(name, value, expected)
