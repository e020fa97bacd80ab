"""What may be asked of the form of an answer, and what is told apart before an engine sees it."""

import dataclasses
import itertools
import json
import subprocess
import sys
import threading

import msgspec
import pytest

from jaxserve import ParameterError, RequestError, SamplingParams, StructuredOutputsParams
from jaxserve.sampling_params import structured_outputs_of
from jaxserve.structured import check_grammar, grammar_text, roomy_threads
from jaxserve.structured_params import MAX_CHARS

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def nested(depth):
    return "[" * depth + "]" * depth


BAD = [
    ({}, "structured_outputs must be exactly one of json, regex, choice, grammar, json_object, got \\[\\]"),
    ({"regex": "a", "choice": ["a"]}, r"must be exactly one of .*, got \['regex', 'choice'\]"),
    ({"json_object": False}, "exactly one of"),
    ({"json_object": 3}, "structured_outputs.json_object must be True or None, got 3"),
    ({"regex": ""}, "structured_outputs.regex must be a non-empty str, got ''"),
    ({"regex": "a\0b"}, "structured_outputs.regex must be without NUL"),
    ({"regex": 5}, "structured_outputs.regex must be a non-empty str, got 5"),
    ({"regex": "a" * (MAX_CHARS + 1)}, f"regex must be at most {MAX_CHARS} characters"),
    ({"regex": "\ud800"}, "regex must be valid Unicode"),
    ({"grammar": ""}, "structured_outputs.grammar must be a non-empty str"),
    ({"choice": []}, "structured_outputs.choice must be a non-empty list of texts, got \\[\\]"),
    ({"choice": "yes"}, "choice must be a non-empty list of texts, got 'yes'"),
    ({"choice": ["a", ""]}, "choice must be made of non-empty texts"),
    ({"choice": ["a", 1]}, "choice must be made of non-empty texts"),
    ({"choice": ["a" * MAX_CHARS]}, f"choice must be at most {MAX_CHARS} characters"),
    ({"json": ""}, "structured_outputs.json must be a JSON schema .*, got ''"),
    ({"json": {}}, "structured_outputs.json must be a JSON schema .*, got {}"),
    ({"json": "[1]"}, "json must be a JSON schema"),
    ({"json": "{"}, "json must be a JSON schema .*; Expecting property name"),
    ({"json": '{"a": NaN}'}, "NaN is no JSON"),
    ({"json": {"a": {1, 2}}}, "json must be a JSON schema .*; Object of type set"),
    ({"json": {"a": float("inf")}}, "json must be a JSON schema"),
    ({"json": ["a"]}, "json must be a JSON schema"),
    ({"json": '{"a": ' + nested(64) + "}"}, "structured_outputs.json must be nested at most 64 deep"),
    ({"json": '{"a": ' + nested(50_000) + "}"}, "structured_outputs.json must be nested at most 64 deep"),
    ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace must be left out: regex is no JSON"),
    ({"json": SCHEMA, "disable_any_whitespace": 1}, "disable_any_whitespace must be True or False, got 1"),
    ({"json": SCHEMA, "whitespace_pattern": ""}, "whitespace_pattern must be a non-empty str"),
    (
        {"json": SCHEMA, "whitespace_pattern": " ", "disable_any_whitespace": True},
        "whitespace_pattern must be None without whitespace",
    ),
    ({"json": SCHEMA, "structural_tag": "x"}, "structured_outputs.structural_tag must be left out: the options are"),
    ("json", "structured_outputs must be an object with some of json, regex"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[str(options)[:60] for options, _ in BAD])
def test_what_cannot_be_meant_is_refused_with_its_name_and_value(options, message):
    with pytest.raises(ParameterError, match=message):
        SamplingParams(structured_outputs=options)


def test_a_schema_that_refers_to_itself_is_refused():
    schema = {"type": "object"}
    schema["properties"] = schema
    with pytest.raises(ParameterError, match="Circular reference"):
        StructuredOutputsParams(json=schema)


def test_nesting_of_64_is_taken():
    StructuredOutputsParams(json='{"a": ' + nested(63) + "}")


def test_a_schema_may_be_an_object_or_its_text_and_is_kept_as_text():
    as_object, as_text = StructuredOutputsParams(json=SCHEMA), StructuredOutputsParams(json=json.dumps(SCHEMA))
    assert as_object == as_text
    assert json.loads(as_object.json) == SCHEMA


def test_it_crosses_the_pipe_to_the_engine_unchanged():
    params = SamplingParams(structured_outputs={"choice": ["a", "é"]}, max_tokens=None)
    packed = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(packed, type=SamplingParams) == params
    assert dataclasses.replace(params, n=2).structured_outputs == params.structured_outputs
    assert SamplingParams.of(structured_outputs={"regex": "a"}).structured_outputs.regex == "a"


def test_openai_names_for_the_same():
    wrapper = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
    assert structured_outputs_of(wrapper) == StructuredOutputsParams(json=SCHEMA)
    assert structured_outputs_of({"type": "json_object"}) == StructuredOutputsParams(json_object=True)
    assert structured_outputs_of({"type": "text"}) is structured_outputs_of(None) is None
    assert structured_outputs_of({"type": "text"}, {"regex": "a"}) == StructuredOutputsParams(regex="a")
    with pytest.raises(ParameterError, match="structured_outputs must be left out: it and response_format exclude"):
        structured_outputs_of(wrapper, {"regex": "a"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("json", "response_format must be an object whose type is text, json_object or json_schema, got 'json'"),
        ({"type": "xml"}, "response_format must be an object whose type"),
        ({"type": []}, "response_format must be an object whose type"),
        ({"type": "json_schema"}, "response_format.json_schema must be an object like"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "response_format.json_schema must be an object like"),
        ({"type": "json_schema", "json_schema": {"schema": []}}, "structured_outputs.json must be a JSON schema"),
    ],
    ids=str,
)
def test_a_response_format_that_cannot_be_meant_is_refused(given, message):
    with pytest.raises(ParameterError, match=message):
        structured_outputs_of(given)


BAD_GRAMMARS = [
    ({"regex": "a(b"}, "structured_outputs.regex cannot be used: .*unclosed group"),
    ({"regex": "(?=a)b"}, "structured_outputs.regex cannot be used: .*look-around"),
    ({"regex": r"(a)\1"}, "structured_outputs.regex cannot be used: .*backreferences"),
    ({"regex": "(" * 60_000 + "a" + ")" * 60_000}, "structured_outputs.regex cannot be used"),
    ({"grammar": "root ::= nothing"}, "structured_outputs.grammar cannot be used: .*Rule 'nothing' not found"),
    ({"grammar": "start: nothing"}, "structured_outputs.grammar cannot be used: .*unknown name"),
    ({"grammar": "plain words"}, "structured_outputs.grammar cannot be used: .*Expected ::="),
    ({"grammar": "root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000}, "structured_outputs.grammar cannot be used"),
    ({"json": {"type": "list"}}, "structured_outputs.json cannot be used: Invalid type: list"),
    ({"json": {"type": "array", "uniqueItems": True}}, r"json cannot be used: Unimplemented keys: \[\"uniqueItems\"\]"),
    ({"json": {"$ref": "http://localhost/x.json"}}, "structured_outputs.json cannot be used: .*not present"),
    ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "structured_outputs.json cannot be used: Unsatisf"),
    ({"json": {"type": "string", "minLength": 10**12}}, "structured_outputs.json cannot be used"),
    ({"json_object": True, "whitespace_pattern": "("}, "structured_outputs.json_object cannot be used"),
]


@pytest.mark.parametrize(("options", "message"), BAD_GRAMMARS, ids=[str(o)[:60] for o, _ in BAD_GRAMMARS])
def test_a_grammar_that_does_not_compile_is_refused_with_the_reason(options, message):
    with pytest.raises(RequestError, match=r"(?s)" + message) as error:
        check_grammar(StructuredOutputsParams(**options))
    assert len(str(error.value)) < 700


def test_chains_of_rules_do_not_overflow_the_stack():
    names = [f"r{i}" for i in range(6000)]
    lark = "start: r0\n" + "\n".join(f'{a}: "a" {b}' for a, b in itertools.pairwise(names)) + '\nr5999: "x"'
    check_grammar(StructuredOutputsParams(grammar=lark))
    refs = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(2500)} | {"d2500": {"type": "null"}}
    check_grammar(StructuredOutputsParams(json={"$defs": refs, "$ref": "#/$defs/d0"}))


def test_objects_are_closed_where_the_schema_names_properties_and_leaves_that_open():
    inner = {"type": "object", "properties": {"b": {"type": "null"}}}
    schema = {
        "properties": {"properties": {"type": "null"}, "open": {"properties": {}, "additionalProperties": True}},
        "items": [inner],
        "$defs": {"enum": inner},
        "enum": [{"properties": {}}],
    }
    text = grammar_text(StructuredOutputsParams(json=schema, disable_additional_properties=True))
    (grammar,) = json.loads(text)["grammars"]
    closed = inner | {"additionalProperties": False}
    found = grammar["json_schema"]
    assert found["properties"] == schema["properties"]
    assert (found["items"], found["$defs"], found["enum"]) == ([closed], {"enum": closed}, schema["enum"])
    assert found["additionalProperties"] is False


def test_without_the_extra_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r'needs llguidance: pip install "jaxserve\[structured\]"'):
        check_grammar(StructuredOutputsParams(regex="never compiled before"))


def test_a_panic_of_the_compiler_is_an_error_of_the_request(monkeypatch):
    class Panic(BaseException):
        pass

    def panics(*arguments, **options):
        raise Panic("as planted")

    monkeypatch.setattr("jaxserve.structured.grammar_text", panics)
    with pytest.raises(RequestError, match="regex cannot be used: as planted"):
        check_grammar(StructuredOutputsParams(regex="panics"))


def test_a_system_without_room_for_the_threads_is_told(monkeypatch):
    def refuses(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuses)
    size = threading.stack_size()
    with pytest.raises(RequestError, match="a grammar needs a thread with 512 MiB of stack: can't start new thread"):
        roomy_threads(2)
    assert threading.stack_size() == size


FIRST_REQUESTS = """
import threading
from jaxserve import StructuredOutputsParams
from jaxserve.structured import check_grammar

together = threading.Barrier(8)

def check(i):
    together.wait()
    check_grammar(StructuredOutputsParams(regex=f"a{i}"))

threads = [threading.Thread(target=check, args=(i,)) for i in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(threading.stack_size(), sum(thread.name.startswith("grammar") for thread in threading.enumerate()))
"""


def test_first_requests_at_once_start_one_thread_and_leave_the_stack_size_as_it_was():
    done = subprocess.run([sys.executable, "-c", FIRST_REQUESTS], capture_output=True, text=True, check=True)
    assert done.stdout == "0 1\n"
