"""Chat templates: Jinja with what Hugging Face's templates rely on, in a sandbox, since a template is foreign code."""

import datetime
import json
from collections.abc import Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

# Put after the last message to find its end in the rendered text; the space tells whether the template trims.
_OPEN_END = "<|jaxserve-open-end|> "


class ChatTemplate:
    """A compiled template.

    Raises:
      ValueError: the source is not valid Jinja.
    """

    def __init__(self, source: str):
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid Jinja, line {error.lineno}: {error}") from error

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[dict[str, Any]] | None,
        **variables: Any,
    ) -> str:
        """The conversation as text; see Tokenizer.apply_chat_template.

        Raises:
          ValueError: malformed messages, contradictory flags, or the template refuses the messages.
        """
        if continue_final_message and add_generation_prompt:
            raise ValueError(
                "add_generation_prompt starts a new message, continue_final_message goes on with the last; set one"
            )
        messages = [_checked(message) for message in messages]
        if not messages:
            raise ValueError("messages must hold at least one message, got none")
        if continue_final_message:
            messages[-1]["content"] += _OPEN_END
        try:
            text = self._template.render(
                messages=messages,
                tools=None if tools is None else [_tool(tool) for tool in tools],
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        return _cut_at_open_end(text) if continue_final_message else text


def _cut_at_open_end(text: str) -> str:
    at = text.rfind(_OPEN_END.strip())
    if at < 0:
        raise ValueError("continue_final_message: the chat template does not print the content of the last message")
    return text[:at] if text[at:].startswith(_OPEN_END) else text[:at].rstrip()


def _checked(message: Any) -> dict[str, Any]:
    """A copy of the message with its text parts joined, as templates expect one string."""
    if not isinstance(message, dict) or "role" not in message:
        raise ValueError(f'a message must be a dict like {{"role": "user", "content": "..."}}, got {message!r}')
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_text_of(part) for part in content)
    if content is not None and not isinstance(content, str):
        raise ValueError(f"a message's content must be a string or a list of text parts, got {content!r}")
    return {**message, "content": content or ""}


def _text_of(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    raise ValueError(f'a content part must be {{"type": "text", "text": "..."}}, got {part!r}')


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise ValueError(f"a tool must be a dict that holds its JSON schema, got {tool!r}")
    return tool


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant said, for training; here its body is just printed."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
