"""Forms to ask for, and whether a text has them."""

import json
import re

from jaxserve import SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
}
CHOICE = ["yes", "no", 'per"haps\n', "naïve 😀", "yes, yes"]
REGEX = r"[a-c]{2,5}-[0-9]{3}(\.[xy])?"
GBNF = 'root ::= "(" root ")" | "x"'
FORMS = {
    "json": {"json": SCHEMA, "disable_any_whitespace": True, "disable_additional_properties": True},
    "regex": {"regex": REGEX},
    "choice": {"choice": CHOICE},
    "gbnf": {"grammar": GBNF},
    "lark": {"grammar": 'start: "<" start ">" | WORD\nWORD: /[a-z]{1,3}/'},
}
FREE = SamplingParams(temperature=1.0, seed=5, max_tokens=30, ignore_eos=True)


def params(form, **options):
    return SamplingParams(**{"max_tokens": 100, "structured_outputs": form} | options)


def generate(llm, prompts, sampling_params):
    return llm.generate(prompts, sampling_params, use_tqdm=False)


def is_in_form(name, text):
    if name == "json":
        found = json.loads(text)
        return (
            set(found) == {"name", "age", "tags"}
            and len(found["name"]) <= 6
            and 0 <= found["age"] <= 150
            and len(found["tags"]) <= 3
            and set(found["tags"]) <= {"x", "y"}
        )
    if name == "choice":
        return text in CHOICE
    patterns = {"regex": REGEX, "gbnf": r"(\()*x(\))*", "lark": "<*[a-z]{1,3}>*"}
    balanced = text.count("(") == text.count(")") and text.count("<") == text.count(">")
    return balanced and re.fullmatch(patterns[name], text) is not None


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]
