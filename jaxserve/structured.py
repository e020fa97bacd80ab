"""From `StructuredOutputsParams` to grammars in llguidance's form, which `grammars.Grammars` runs in the engine.

llguidance is an extra: nothing imports it before a request asks for it.
"""

import concurrent.futures
import functools
import json
import threading
from typing import Any

from jaxserve.exceptions import RequestError, how_to_install
from jaxserve.structured_params import CONSTRAINTS, StructuredOutputsParams

# Beside llguidance's fuel, which bounds the time that a compile and a mask take. A lexer state takes 1 to 2 KB.
LIMITS = {"max_lexer_states": 50_000, "verbose_errors": False}
STACK_BYTES = 512 << 20  # of a thread that compiles; reserved, but taken only as far as it is used
_starting = threading.RLock()  # held while the stack size, which is the whole process's, is not the usual one
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # name -> schema
_PLAIN_VALUES = ("enum", "const", "default", "examples")


def check_grammar(params: StructuredOutputsParams) -> None:
    """Compiles the constraint for a vocabulary of single bytes, which is fast and finds nearly all mistakes.

    Raises:
        RequestError: it does not compile, or llguidance is not installed.
    """
    import_llguidance()
    problem = _problem(params)
    if problem:
        kind = next(name for name in CONSTRAINTS if getattr(params, name) is not None)
        raise RequestError(f"structured_outputs.{kind} cannot be used: {problem}")


def grammar_text(params: StructuredOutputsParams) -> str:
    """The constraint in llguidance's own form, as text. Runs in one of `roomy_threads`.

    Raises:
        ValueError: it is malformed.
    """
    llguidance = import_llguidance()
    if params.regex is not None:
        return llguidance.grammar_from("regex", params.regex)
    if params.choice is not None:
        alternatives = " | ".join(json.dumps(text, ensure_ascii=False) for text in params.choice)
        return llguidance.grammar_from("lark", f"start: {alternatives}")
    if params.grammar is not None:
        return llguidance.grammar_from("grammar", params.grammar)
    schema = {"type": "object"} if params.json is None else json.loads(str(params.json))
    if params.disable_additional_properties:
        schema = _closed(schema)
    options: dict[str, Any] = {"whitespace_flexible": not params.disable_any_whitespace}
    if params.whitespace_pattern is not None:
        options["whitespace_pattern"] = params.whitespace_pattern
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)


def roomy_threads(count: int) -> concurrent.futures.ThreadPoolExecutor:
    """Threads for llguidance's compiler: it recurses over chains of rules, and an overflow would end the process.

    Raises:
        RequestError: the system gives no such threads.
    """
    pool = concurrent.futures.ThreadPoolExecutor(count, "grammar")
    meeting = threading.Barrier(count)  # so that each of these starts a thread
    with _starting:
        before = threading.stack_size(STACK_BYTES)
        try:
            concurrent.futures.wait([pool.submit(meeting.wait) for _ in range(count)])
        except RuntimeError as error:
            meeting.abort()
            raise RequestError(f"a grammar needs a thread with {STACK_BYTES >> 20} MiB of stack: {error}") from error
        finally:
            threading.stack_size(before)
    return pool


@functools.cache
def _checkers() -> concurrent.futures.ThreadPoolExecutor:
    return roomy_threads(1)


@functools.lru_cache(maxsize=64)
def _problem(params: StructuredOutputsParams) -> str:
    with _starting:  # a cached function that two threads call at first runs twice
        checkers = _checkers()
    return checkers.submit(_find_problem, params).result()


def _find_problem(params: StructuredOutputsParams) -> str:
    llguidance = import_llguidance()
    try:
        grammar, limits = grammar_text(params), llguidance.LLParserLimits(**LIMITS)
        is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, None, limits=limits)
    except BaseException as error:  # a panic in Rust is no Exception; signals do not come to this thread
        return readable(str(error))
    return readable(messages[0]) if is_error else ""


def readable(message: str) -> str:
    """llguidance's words about a problem, without what it leaves out and not too many."""
    message = message.removesuffix("<non-verbose/>").strip()
    if message == "NoExtensionBias":
        return "it leaves no text that may come next"
    return message if len(message) <= 500 else message[:500] + "..."


def _closed(schema: Any) -> Any:
    """The schema with additionalProperties false wherever it names properties and leaves that open."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {}
    for key, value in schema.items():
        if key in _NAMED_SCHEMAS and isinstance(value, dict):
            closed[key] = {name: _closed(inner) for name, inner in value.items()}
        else:
            closed[key] = value if key in _PLAIN_VALUES else _closed(value)
    if "properties" in closed or "patternProperties" in closed:
        closed.setdefault("additionalProperties", False)
    return closed


def import_llguidance() -> Any:
    """The package; untyped, since it may not be there.

    Raises:
        RequestError: it is not installed.
    """
    try:
        import llguidance
        import llguidance.numpy
    except ModuleNotFoundError as error:
        if error.name != "llguidance":
            raise
        raise RequestError(f"structured_outputs needs llguidance: {how_to_install('structured')}") from error
    return llguidance
