"""The engine of a benchmark, its prompts and its sampling."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from jaxserve.cli import engine as driver
from jaxserve.cli.options import Opt
from jaxserve.cli.output import progress
from jaxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np

    from jaxserve import LLM, LLMEngine
    from jaxserve.cli.bench.workload import SyntheticRequest

WORKLOAD_OPTIONS: Mapping[str, Opt] = {
    "num_prompts": Opt(int, "Number of requests.", 100),
    "dataset_name": Opt(
        str,
        "Lengths of prompts and answers: random (the --random options are for that alone), or as in traces, "
        "cut to max_model_len: sharegpt-like, arxiv-like, azure-code-like, azure-conv-like.",
        "random",
    ),
    "random_input_len": Opt(int, "Tokens of a prompt.", 1024),
    "random_output_len": Opt(int, "Tokens of an answer.", 128),
    "random_range_ratio": Opt(float, "Lengths vary evenly by this share, in [0, 1).", 0.0),
    "random_prefix_len": Opt(int, "Tokens that all prompts share, on top of their own.", 0),
    "seed": Opt(int, "Of prompts, lengths and arrivals.", 0),
}


def start(options: Mapping[str, Any]) -> "LLM":
    """An engine whose programs are compiled before the first measurement, unless the options say otherwise."""
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    with progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()) as bar:
        bar.add_task("loading the model and compiling (sooner next time)")
        return driver.start({"warm_up": "blocking", **options})


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr; the given function counts one more as done."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with progress(TextColumn("{task.description}"), *columns) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def require_known(workload: Mapping[str, Any]) -> None:
    """Raises ValueError for a dataset that there is not, before a model is loaded for it."""
    from jaxserve.cli.bench.workload import DATASETS

    if workload["dataset_name"] not in ("random", *DATASETS):
        known = ", ".join(("random", *DATASETS))
        raise ValueError(f"--dataset-name must be one of {known}, got {workload['dataset_name']!r}")


def generator(seed: int) -> "np.random.Generator":
    """The source of all that is random in a benchmark.

    Raises:
        ValueError: a negative seed.
    """
    import numpy as np

    if seed < 0:
        raise ValueError(f"--seed must be at least 0, got {seed}")
    return np.random.default_rng(seed)


def requests(engine: "LLMEngine", workload: Mapping[str, Any], rng: "np.random.Generator") -> "list[SyntheticRequest]":
    """The requests that `WORKLOAD_OPTIONS` describe, of any token but the special ones."""
    from jaxserve.cli.bench.workload import dataset_requests, random_requests

    special = set(engine.tokenizer.all_special_ids) if engine.tokenizer else set()
    limits = engine.core.limits()
    token_ids = [token for token in range(limits.vocab_size) if token not in special]
    if workload["dataset_name"] != "random":
        return dataset_requests(
            workload["dataset_name"],
            workload["num_prompts"],
            max_model_len=limits.max_model_len,
            token_ids=token_ids,
            rng=rng,
        )
    return random_requests(
        workload["num_prompts"],
        input_len=workload["random_input_len"],
        output_len=workload["random_output_len"],
        range_ratio=workload["random_range_ratio"],
        prefix_len=workload["random_prefix_len"],
        token_ids=token_ids,
        rng=rng,
    )


def greedy(output_len: int, **options: Any) -> SamplingParams:
    """Exactly `output_len` tokens, without text."""
    fixed = {"temperature": 0.0, "max_tokens": output_len, "ignore_eos": True, "detokenize": False}
    return SamplingParams(**{**fixed, **options})
