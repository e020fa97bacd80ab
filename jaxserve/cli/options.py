"""The options that several commands share, each written once: what the engine takes and how to sample.

An option without a default that was not given is left out, so that the library's own default holds.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import typer


class Opt(NamedTuple):
    """One command-line option; `--max-model-len` is the argument max_model_len. A default of None leaves it out."""

    type: Any
    help: str
    default: Any = None


REQUIRED = inspect.Parameter.empty


ENGINE_OPTIONS: Mapping[str, Opt] = {  # arguments of jaxserve.LLM
    "model": Opt(str, "smollm2-135m, a Hugging Face id or folder, a .gguf file or an Orbax folder.", REQUIRED),
    "tokenizer": Opt(str, "Folder, id or file of the tokenizer, where it is not the model's."),
    "dtype": Opt(str, "auto, bfloat16, float16 or float32."),
    "quantization": Opt(str, "Quantise the weights while loading, for instance int8."),
    "load_format": Opt(str, "auto, or dummy for random weights."),
    "revision": Opt(str, "Branch, tag or commit of a Hugging Face id."),
    "max_model_len": Opt(int, "Longest prompt and answer together, in tokens."),
    "page_size": Opt(int, "Tokens in a page of the KV cache."),
    "num_pages": Opt(int, "Pages of the KV cache, in place of what memory allows."),
    "device_memory_utilization": Opt(float, "Share of the device's memory to use."),
    "kv_cache_memory_bytes": Opt(int, "Bytes of the KV cache, in place of what memory allows."),
    "max_num_seqs": Opt(int, "Most sequences in one step."),
    "max_num_batched_tokens": Opt(int, "Most tokens in one step."),
    "scheduling_policy": Opt(str, "fcfs, or priority (the lower value goes first)."),
    "enable_prefix_caching": Opt(bool, "Share the KV cache of equal prompt beginnings."),
    "enable_chunked_prefill": Opt(bool, "Spread a long prompt over several steps."),
    "async_scheduling": Opt(bool, "Schedule the next step while the device runs this one."),
    "warm_up": Opt(str, "When to compile the step programs: background, blocking or off."),
}

SAMPLING_OPTIONS: Mapping[str, Opt] = {  # fields of jaxserve.SamplingParams
    "max_tokens": Opt(int, "Most tokens of an answer."),
    "min_tokens": Opt(int, "Fewest tokens of an answer."),
    "temperature": Opt(float, "0 always takes the likeliest token."),
    "top_p": Opt(float, "Sample from the likeliest tokens that hold this much probability."),
    "top_k": Opt(int, "Sample from this many likeliest tokens."),
    "min_p": Opt(float, "Sample from tokens with at least this share of the likeliest one's probability."),
    "presence_penalty": Opt(float, "Against tokens that the answer has already."),
    "frequency_penalty": Opt(float, "Against tokens, by how often the answer has them."),
    "repetition_penalty": Opt(float, "Against tokens that the prompt or the answer has; 1 is off."),
    "seed": Opt(int, "Makes sampling repeatable."),
    "stop": Opt(list[str], "End the answer before this text; may be given several times."),
    "ignore_eos": Opt(bool, "Go on past the end-of-sequence token."),
}


def takes(**groups: Mapping[str, Opt]) -> Callable[[Callable], Callable]:
    """Gives a command the options of each group; the command gets those that were given as one dict a group.

    @takes(engine=ENGINE_OPTIONS)
    def info(engine: dict[str, Any]) -> None: ...
    """

    def decorate(command: Callable) -> Callable:
        @functools.wraps(command)
        def run(**values: Any) -> Any:
            for group, table in groups.items():
                found = {name: values.pop(name) for name in table}
                values[group] = {name: value for name, value in found.items() if value is not None and value != []}
            return command(**values)

        own = [p for p in inspect.signature(command).parameters.values() if p.name not in groups]
        added = [_parameter(group, name, opt) for group, table in groups.items() for name, opt in table.items()]
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in [*added, *own]]
        run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
        return run

    return decorate


def _parameter(group: str, name: str, opt: Opt) -> inspect.Parameter:
    optional = opt.default is None
    option = typer.Option(help=opt.help, show_default=not optional, rich_help_panel=f"{group.capitalize()} options")
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=opt.default,
        annotation=Annotated[opt.type | None if optional else opt.type, option],
    )
