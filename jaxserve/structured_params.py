"""What a caller asks of the form of an answer: a JSON schema, a regular expression, a choice or a grammar."""

import dataclasses
import json as json_text
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.exceptions import ParameterError

CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object")
MAX_CHARS = 1 << 17  # of one constraint; bounds the time and the stack that its compile takes
MAX_NESTING = 64
_JSON_OPTIONS = ("disable_any_whitespace", "disable_additional_properties")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The form that an answer must have: exactly one of the first five, in vLLM's names.

    Attributes:
        json: a JSON schema, as an object or as text; kept as text.
        regex: a regular expression that the whole answer matches. Rust's syntax: no look-around, no back references.
        choice: texts of which the answer is one.
        grammar: a context-free grammar in Lark (as llguidance reads it) or in GBNF.
        json_object: True for any JSON object.
        disable_any_whitespace: write JSON without whitespace between its parts.
        disable_additional_properties: objects of a schema that does not say so have no properties but those it names.
        whitespace_pattern: a regular expression of the whitespace between the parts of JSON.

    Raises:
        ParameterError: a field is empty, too large or malformed, or there is not exactly one constraint.
        TypeError: an unknown option.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        for name in _JSON_OPTIONS:
            if not isinstance(getattr(self, name), bool):
                raise ParameterError(_path(name), getattr(self, name), "True or False")
        if self.json_object not in (None, True, False):
            raise ParameterError(_path("json_object"), self.json_object, "True or None")
        if not self.json_object:
            object.__setattr__(self, "json_object", None)  # False, as JSON clients write it: not asked for
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ParameterError("structured_outputs", given, f"exactly one of {', '.join(CONSTRAINTS)}")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        elif self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        else:
            self._check_texts()
        self._check_json_options(given[0])

    def _check_texts(self) -> None:
        for name in ("regex", "grammar"):
            text = getattr(self, name)
            if text is not None:
                _check_text(name, text)
        if self.regex is not None and "\0" in self.regex:
            raise ParameterError(_path("regex"), self.regex, "without NUL")

    def _check_json_options(self, constraint: str) -> None:
        if self.whitespace_pattern is not None:
            _check_text("whitespace_pattern", self.whitespace_pattern)
            if self.disable_any_whitespace:
                raise ParameterError(_path("whitespace_pattern"), self.whitespace_pattern, "None without whitespace")
        for name in (*_JSON_OPTIONS, "whitespace_pattern"):
            if getattr(self, name) and constraint not in ("json", "json_object"):
                raise ParameterError(_path(name), getattr(self, name), f"left out: {constraint} is no JSON")

    @classmethod
    def of(cls, given: object) -> "StructuredOutputsParams":
        """`given` itself, or made from a mapping that came from outside.

        Raises:
            ParameterError: neither of them, an unknown option, or a value out of range.
        """
        if isinstance(given, cls):
            return given
        known = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(given, Mapping):
            raise ParameterError("structured_outputs", given, f"an object with some of {', '.join(known)}")
        for name, value in given.items():
            if name not in known:
                raise ParameterError(_path(name), value, f"left out: the options are {', '.join(known)}")
        return cls(**given)


def structured_outputs_of(response_format: object, ours: object = None) -> StructuredOutputsParams | None:
    """What OpenAI's `response_format` asks for, or `structured_outputs` (`ours`) beside it; None for plain text.

    Raises:
        ParameterError: the first is no `{"type": "text"}`, `{"type": "json_object"}` or
            `{"type": "json_schema", "json_schema": {"schema": ...}}`, the second none of ours, or both ask for a form.
    """
    form = None if response_format is None else _form_of(response_format)
    if ours is None:
        return form
    if form is not None:
        raise ParameterError("structured_outputs", ours, "left out: it and response_format exclude each other")
    return StructuredOutputsParams.of(ours)


def _form_of(response_format: object) -> StructuredOutputsParams | None:
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind not in ("text", "json_object", "json_schema"):
        expected = "an object whose type is text, json_object or json_schema"
        raise ParameterError("response_format", response_format, expected)
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    assert isinstance(response_format, Mapping)
    wrapper = response_format.get("json_schema")
    schema = wrapper.get("schema") if isinstance(wrapper, Mapping) else None
    if schema is None:
        raise ParameterError("response_format.json_schema", wrapper, 'an object like {"name": ..., "schema": {...}}')
    return StructuredOutputsParams(json=schema)


def _path(name: object) -> str:
    return f"structured_outputs.{name}"


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str) or not text:
        raise ParameterError(_path(name), text, "a non-empty str")
    if len(text) > MAX_CHARS:
        raise ParameterError(_path(name), f"{len(text)} characters", f"at most {MAX_CHARS} characters")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ParameterError(_path(name), text, f"valid Unicode ({error.reason})") from error


def _choices(given: object) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise ParameterError(_path("choice"), given, "a non-empty list of texts")
    if any(not isinstance(text, str) or not text for text in given):
        raise ParameterError(_path("choice"), list(given), "made of non-empty texts")
    _check_text("choice", "|" + "|".join(given))
    return tuple(given)


def _schema_text(given: object) -> str:
    """The schema as JSON text, which holds one object that is not too deep."""
    expected = "a JSON schema (a non-empty object, or its text)"
    try:
        if not isinstance(given, str | Mapping) or not given:
            raise ParameterError(_path("json"), given, expected)
        text = given if isinstance(given, str) else json_text.dumps(dict(given), ensure_ascii=False, allow_nan=False)
        _check_text("json", text)
        schema = json_text.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ParameterError(_path("json"), given, f"nested at most {MAX_NESTING} deep") from error
    except (TypeError, ValueError) as error:
        if isinstance(error, ParameterError):
            raise
        raise ParameterError(_path("json"), given, f"{expected}; {error}") from error
    if not isinstance(schema, dict) or not schema:
        raise ParameterError(_path("json"), given, expected)
    if _is_deeper(schema, MAX_NESTING):
        raise ParameterError(_path("json"), given, f"nested at most {MAX_NESTING} deep")
    return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _is_deeper(value: dict, limit: int) -> bool:
    """Whether objects and lists, `value` among them, are nested more than `limit` times."""
    level: list[Any] = [value]
    for _ in range(limit):
        inner = (child for outer in level for child in (outer.values() if isinstance(outer, dict) else outer))
        level = [child for child in inner if isinstance(child, dict | list)]
    return bool(level)
