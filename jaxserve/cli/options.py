"""The options that several commands share, each written once: what the engine takes and how to sample.

An option without a default that was not given is left out, so that the library's own default holds.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer


class Opt(NamedTuple):
    """One command-line option; `--max-model-len` is the argument max_model_len.

    A default of None leaves the option out; `unset` then tells in the help what the library does without it.
    """

    type: Any
    help: str
    default: Any = None
    unset: str = ""


REQUIRED = inspect.Parameter.empty


ENGINE_OPTIONS: Mapping[str, Opt] = {  # arguments of jaxserve.LLM
    "model": Opt(str, "smollm2-135m, a Hugging Face id or folder, a .gguf file or an Orbax folder.", REQUIRED),
    "tokenizer": Opt(str, "Folder, id or file of a tokenizer.", unset="the model's"),
    "dtype": Opt(str, "bfloat16, float16, float32, or auto for bfloat16.", unset="auto"),
    "quantization": Opt(str, "Quantise the weights while loading: int8.", unset="as they are"),
    "load_format": Opt(str, "auto, or dummy for random weights.", unset="auto"),
    "revision": Opt(str, "Branch, tag or commit of a Hugging Face id.", unset="main"),
    "max_model_len": Opt(
        int, "Longest prompt and answer together, in tokens.", unset="the model's, or what the KV cache holds"
    ),
    "page_size": Opt(int, "Tokens in a page of the KV cache.", unset="16 on CPU, 64 elsewhere"),
    "num_pages": Opt(int, "Pages of the KV cache, on all devices together.", unset="what its memory holds"),
    "kv_cache_dtype": Opt(
        str, "auto for the model's dtype; fp8 (e4m3) halves the KV cache's bytes a token.", unset="auto"
    ),
    "device_memory_utilization": Opt(
        float, "Share of JAX's device memory for weights, state and KV pool.", unset="0.9"
    ),
    "kv_cache_memory_bytes": Opt(
        int, "Bytes of the KV cache on each device.", unset="1 GiB on CPU, what the weights leave elsewhere"
    ),
    "tensor_parallel_size": Opt(int, "Devices that share the weights, and the KV cache by heads.", unset="1"),
    "kv_parallel_size": Opt(
        int,
        "Devices that share the weights, and the KV cache by pages: for long contexts. Times tensor-parallel-size.",
        unset="1",
    ),
    "coordinator_address": Opt(
        str,
        "host:port of process 0, where several processes (one a host, all with these options) share a model; auto "
        "finds them on Cloud TPU, Slurm and the like.",
        unset="one process",
    ),
    "num_processes": Opt(int, "How many processes there are, with a host:port."),
    "process_id": Opt(int, "Which of them this one is, from 0, with a host:port; 0 takes the requests."),
    "max_num_seqs": Opt(int, "Most sequences in one step.", unset="32 on CPU, 256 elsewhere"),
    "max_num_batched_tokens": Opt(int, "Most tokens in one step.", unset="512 on CPU, 8192 elsewhere"),
    "max_num_queued_reqs": Opt(int, "Most sequences that may wait; more are refused.", unset="no limit"),
    "max_num_queued_tokens": Opt(int, "Most prompt tokens that may wait; more are refused.", unset="no limit"),
    "scheduling_policy": Opt(
        str, "fcfs (first come, first served), or priority (the lower value goes first).", unset="fcfs"
    ),
    "enable_prefix_caching": Opt(bool, "Share the KV cache of equal prompt beginnings.", unset="on"),
    "enable_chunked_prefill": Opt(bool, "Spread a long prompt over several steps.", unset="on"),
    "prioritize_prefill": Opt(
        bool,
        "Let decodes wait for prompts that fill a step: sooner done as a whole, but answers stall meanwhile.",
        unset="off; generate, chat, batch and bench but for bench serve: on",
    ),
    "prefill": Opt(
        str,
        "How prompts pass the layers beside decodes: chunked (some tokens a step), layered (some layers a step), or "
        "auto for what is quicker.",
        unset="chunked",
    ),
    "target_tbt_ms": Opt(
        float,
        "Time between tokens that layered and auto keep to, in milliseconds.",
        unset="512 tokens' work a step",
    ),
    "prefill_order": Opt(
        str,
        "Which prompt goes first with layered and auto: fcfs, shortest (a short one overtakes a long one between two "
        "groups of layers), or slack (the earliest deadline that can be met).",
        unset="fcfs",
    ),
    "sparse_attention": Opt(
        str,
        "Read some pages of the KV cache only: quest, lserve, streaming_llm, h2o, snapkv or blasst for answers, or "
        "JSON such as "
        """'{"decode": {"policy": "quest", "budget": 1024}}', see docs/sparse_attention.md.""",
        unset="all are read",
    ),
    "async_scheduling": Opt(bool, "Schedule the next step while the device runs this one.", unset="on"),
    "warm_up": Opt(
        str,
        "When to compile the step programs: background, blocking or off.",
        unset="background; generate: off; bench: blocking",
    ),
    "otlp_traces_endpoint": Opt(
        str,
        "Send a trace of each request to this OTLP/gRPC endpoint, such as http://localhost:4317 (extra [tracing]).",
        unset="OTEL_EXPORTER_OTLP_ENDPOINT, else none",
    ),
}

SAMPLING_OPTIONS: Mapping[str, Opt] = {  # fields of jaxserve.SamplingParams
    "max_tokens": Opt(int, "Most tokens of an answer.", unset="256"),
    "min_tokens": Opt(int, "Fewest tokens of an answer.", unset="0"),
    "temperature": Opt(float, "0 always takes the likeliest token.", unset="the model's, else 1.0"),
    "top_p": Opt(
        float, "Sample from the likeliest tokens that hold this much probability.", unset="the model's, else 1.0"
    ),
    "top_k": Opt(int, "Sample from this many likeliest tokens; 0 is off.", unset="the model's, else 0"),
    "min_p": Opt(
        float,
        "Sample from tokens with at least this share of the likeliest one's probability.",
        unset="the model's, else 0.0",
    ),
    "presence_penalty": Opt(float, "Against tokens that the answer has already.", unset="0.0"),
    "frequency_penalty": Opt(float, "Against tokens, by how often the answer has them.", unset="0.0"),
    "repetition_penalty": Opt(
        float, "Against tokens that the prompt or the answer has; 1 is off.", unset="the model's, else 1.0"
    ),
    "seed": Opt(int, "Makes sampling repeatable.", unset="another one each request"),
    "stop": Opt(list[str], "End the answer before this text; may be given several times."),
    "ignore_eos": Opt(bool, "Go on past the end-of-sequence token.", unset="off"),
    "structured_outputs": Opt(
        str,
        """The form of the answer, as JSON or a file with it: {"json": a schema}, {"regex": ...}, {"choice": [...]}, """
        """{"grammar": ...} or {"json_object": true}. Extra [structured].""",
        unset="any text",
    ),
}

ProfileOption = Annotated[
    Path | None,
    typer.Option(file_okay=False, writable=True, help="Write a JAX profiler trace of the run into this folder."),
]


def require_command(context: typer.Context) -> None:
    """The callback of a group of commands: its help, where none of them is named."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


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
        added = [_parameter(name, opt) for table in groups.values() for name, opt in table.items()]
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in [*own, *added]]
        run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
        return run

    return decorate


def _parameter(name: str, opt: Opt) -> inspect.Parameter:
    optional = opt.default is None
    text = f"{opt.help}  [default: {opt.unset}]" if opt.unset else opt.help
    option = typer.Option(help=text, show_default=not optional)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=opt.default,
        annotation=Annotated[opt.type | None if optional else opt.type, option],
    )
