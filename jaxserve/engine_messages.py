"""What crosses the pipe between `AsyncLLM` and its engine's process: one message a step each way, in msgpack."""

from typing import Any

import msgspec
import tokenizers

from jaxserve.core_types import CoreOutput, CoreRequest
from jaxserve.exceptions import QueueFullError, RequestError
from jaxserve.tokenizer import Tokenizer


class TokenizerFacts(msgspec.Struct, array_like=True):
    """A `Tokenizer`, written out."""

    backend: str  # tokenizer.json
    named_tokens: dict[str, str]
    chat_template: str | None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "TokenizerFacts":
        return cls(tokenizer.backend.to_str(), tokenizer.named_tokens, tokenizer.chat_template)

    def tokenizer(self) -> Tokenizer:
        backend = tokenizers.Tokenizer.from_str(self.backend)
        return Tokenizer(backend, named_tokens=self.named_tokens, chat_template=self.chat_template)


class Facts(msgspec.Struct, array_like=True):
    """What the parent must know of the loaded model."""

    tokenizer: TokenizerFacts | None
    vocab_size: int
    max_model_len: int
    max_logprobs: int
    generation_config: dict[str, Any]
    seed: int


class Group(msgspec.Struct, array_like=True):
    """One request: its n sequences, all of which run or none. They are packed apart, so that a field of the wrong type
    costs this request only."""

    request_id: str
    seq_id: int  # of the first sequence
    packed: msgspec.Raw  # list[CoreRequest]

    @classmethod
    def of(cls, request_id: str, sequences: list[CoreRequest]) -> "Group":
        """Raises RequestError when a value in it is not plain (numbers, strings of Unicode, lists, dicts)."""
        _pack(request_id)  # it crosses outside of `packed`, where a failure would cost the whole message
        return cls(request_id, sequences[0].seq_id, msgspec.Raw(_pack(sequences)))

    def sequences(self) -> list[CoreRequest]:
        """Raises RequestError when a field has the wrong type."""
        try:
            return _UNPACK(self.packed)
        except (msgspec.ValidationError, RecursionError) as error:
            raise RequestError(f"the request holds a value of the wrong type: {error}") from error


def _pack(value: Any) -> bytes:
    try:
        return _PACK(value)
    except (TypeError, OverflowError, UnicodeEncodeError, RecursionError) as error:
        raise RequestError(f"the request holds a value that cannot reach the engine: {error}") from error


_PACK = msgspec.msgpack.Encoder().encode
_UNPACK = msgspec.msgpack.Decoder(list[CoreRequest]).decode


class Question(msgspec.Struct, array_like=True):
    """A call of one of the core's methods with plain arguments; the parent waits for the answer."""

    number: int
    method: str
    arguments: list[Any] = []

    @classmethod
    def of(cls, number: int, method: str, *arguments: Any) -> "Question":
        """Raises RequestError when an argument is not plain."""
        _pack(arguments)  # here, where a failure costs this question only
        return cls(number, method, list(arguments))


class ToEngine(msgspec.Struct, array_like=True):
    """Everything the parent has to say since its last message."""

    groups: list[Group] = []
    aborts: list[int] = []
    stops: list[tuple[int, str]] = []  # sequence and the stop string that its text ran into
    questions: list[Question] = []


class Rejection(msgspec.Struct, array_like=True):
    """The core refused a request, whose first sequence is `seq_id`: none of it runs."""

    request_id: str
    seq_id: int
    message: str
    queue_full: bool

    def error(self) -> RequestError:
        """The error to raise in the caller."""
        return QueueFullError(self.message) if self.queue_full else RequestError(self.message)


class Answer(msgspec.Struct, array_like=True):
    """What a `Question` got: a plain value, or the message of the RequestError that it met."""

    number: int
    value: Any = None
    error: str | None = None


class FromEngine(msgspec.Struct, array_like=True):
    """Everything one step has to say. `facts` comes once, when the model is loaded; `death` is the last message."""

    outputs: list[CoreOutput] = []
    rejections: list[Rejection] = []
    answers: list[Answer] = []
    facts: Facts | None = None
    death: str | None = None
