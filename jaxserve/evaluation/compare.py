"""Policies beside dense attention, in one table."""

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxserve import weights
from jaxserve.evaluation import retrieval
from jaxserve.evaluation.speed import seconds_per_token
from jaxserve.evaluation.tasks import TASKS, Sample, Task
from jaxserve.evaluation.watch import Prompt, Reader, needs_own_prompt
from jaxserve.evaluation.watched import NO_SHARES, Watched, mean_shares
from jaxserve.layers.sparse import SparseAttention
from jaxserve.tokenizer import Tokenizer

ENOUGH = 0.95  # of dense attention's answers must be right for a task to tell anything
MOST_TOLD = 512  # tokens of the text's end that go through the policies, at most; a quarter if that is less


class Comparison(NamedTuple):
    """What `compare` found."""

    rows: list[dict[str, Any]]  # one for dense attention, then one a policy
    left_out: dict[str, float]  # tasks that dense attention does not solve, with its share of right answers


class Text(NamedTuple):
    """A prompt, and what may follow it, each after the prompt alone."""

    token_ids: list[int]
    answers: list["Answer"]


class Answer(NamedTuple):
    """Tokens that go through the policies, of which the last `num_asked` must be found."""

    token_ids: list[int]
    num_asked: int


@dataclasses.dataclass
class _Row:
    """What is found of one policy."""

    right: dict[str, list[bool]] = dataclasses.field(default_factory=dict)
    shares: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    told: Watched | None = None
    seconds: float | None = None

    def add(self, name: str, found: Watched) -> None:
        self.shares[name] = self.shares.get(name, NO_SHARES) + found.shares


def compare(
    model: str,
    policies: Sequence[SparseAttention | None],
    text: str | None,
    *,
    num_tokens: int,
    num_samples: int,
    page_size: int,
    tasks: Sequence[str] | None = None,
    speed: bool = True,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Comparison:
    """One row for dense attention, then one a policy.

    Tasks: the share of answers that greedy decoding gives exactly; their questions go through the policies too. A task
    of which dense attention solves less than 95 % is left out. Text: perplexity of its end, and the mean divergence
    from dense attention. Recall and density are the means over all that the row has, as `Watched` has them. Speed:
    seconds of a decode step of one sequence.

    Args:
        model: as `weights.load` takes it, or "retrieval" for that of `retrieval`, which has tasks of its own.
        text: may be None.
        num_tokens: of each text with its answer.
        num_samples: texts of each task; 0 leaves tasks out.
        tasks: names of some of them; None = all.
        on_progress: called with passes done and passes in all.
    Raises:
        ValueError: a text that is too short, more tokens than the model's context, an unknown task, or policies that do
            not fit the model.
    """
    known = retrieval.TASKS if model == retrieval.RETRIEVAL_MODEL else TASKS
    if unknown := sorted(set(tasks or ()) - set(known)):
        raise ValueError(f"tasks must be among {list(known)}, got {unknown}")
    if model == retrieval.RETRIEVAL_MODEL and text is not None:
        raise ValueError("the retrieval model knows no language: leave the text out, or name another model")
    loaded = _load(model)
    if loaded.tokenizer is None:
        raise ValueError(f"model must come with a tokenizer, got {model}")
    progress = _Progress(on_progress)
    reader = Reader(loaded, max_tokens=num_tokens, page_size=page_size, on_pass=progress.one_done)
    found: dict[SparseAttention | None, _Row] = {sparse: _Row() for sparse in [None, *policies]}
    for sparse in found:
        reader.check(sparse)
    samples = {
        name: [fitted(loaded.tokenizer, name, task, num_tokens, seed) for seed in range(num_samples)]
        for name, task in known.items()
        if num_samples and name in (tasks or known)
    }
    told = None if text is None else _end_of(loaded.tokenizer, text, num_tokens)
    texts = [*([] if told is None else [told]), *(each for some in samples.values() for each in some)]
    progress.total = sum(_passes(reader, list(found), each) for each in texts)
    if told is not None:
        (answer,) = told.answers
        for row, prompt in _under_each(reader, found, told, speed):
            row.told = reader.ask(prompt, answer.token_ids)
            row.add("text", row.told)
    for name, some in samples.items():
        allowed = (1 - ENOUGH) * sum(len(each.answers) for each in some)
        for i, sample in enumerate(some):
            for row, prompt in _under_each(reader, found, sample, speed):
                for answer in sample.answers:
                    says = reader.ask(prompt, answer.token_ids)
                    row.add(name, says)
                    row.right.setdefault(name, []).append(says.says(answer.token_ids[-answer.num_asked :]))
            if found[None].right[name].count(False) > allowed:
                progress.total -= sum(_passes(reader, list(found), each) for each in some[i + 1 :])
                break
    return _table(found, told)


def _under_each(
    reader: Reader, rows: Mapping[SparseAttention | None, _Row], text: Text, speed: bool
) -> Iterator[tuple[_Row, Prompt]]:
    """The text's prompt as each policy has it; each is timed with its first one."""
    shared = reader.read(text.token_ids)
    for sparse, row in rows.items():
        own = needs_own_prompt(sparse)
        prompt = reader.read(text.token_ids, sparse) if own else reader.under(shared, sparse)
        if speed and row.seconds is None:
            row.seconds = seconds_per_token(reader, prompt)
        yield row, prompt


def _load(model: str) -> weights.LoadedModel:
    if model != retrieval.RETRIEVAL_MODEL:
        return weights.load(model, dtype=jnp.bfloat16, progress=False)
    with tempfile.TemporaryDirectory() as folder:
        retrieval.write(Path(folder))
        return weights.load(folder, progress=False)


def _table(found: Mapping[SparseAttention | None, _Row], told: Text | None) -> Comparison:
    dense = found[None]
    shares = {name: float(np.mean(right)) for name, right in dense.right.items()}
    left_out = {name: share for name, share in shares.items() if share < ENOUGH}
    rows = []
    for sparse, row in found.items():
        values: dict[str, Any] = {"policy": _described(sparse)}
        values |= {name: float(np.mean(right)) for name, right in row.right.items() if name not in left_out}
        if row.told is not None and dense.told is not None and told is not None:
            nll = row.told.nll(told.answers[0].token_ids)
            values |= {"perplexity": float(np.exp(nll)), "kl": row.told.kl_from(dense.told)}
        recall, density = mean_shares(sum((row.shares[name] for name in row.shares if name not in left_out), NO_SHARES))
        values |= {"recall": recall, "density": density}
        if row.seconds is not None:
            values["s/token"] = row.seconds
        rows.append(values)
    return Comparison(rows, left_out)


class _Progress:
    """Counts passes of the model."""

    def __init__(self, on_progress: Callable[[int, int], None]) -> None:
        self.done, self.total, self._on_progress = 0, 0, on_progress

    def one_done(self) -> None:
        self.done += 1
        self._on_progress(self.done, self.total)


def _passes(reader: Reader, policies: Sequence[SparseAttention | None], text: Text) -> int:
    """Of the model, for a text under all policies."""
    reads, num_prompt = 1 + sum(map(needs_own_prompt, policies)), len(text.token_ids)
    answers = sum(reader.num_passes(num_prompt, len(answer.token_ids)) for answer in text.answers)
    return reads * reader.num_passes(num_prompt) + len(policies) * answers


def _described(sparse: SparseAttention | None) -> str:
    """The policies' names, and what differs from their defaults."""
    if sparse is None:
        return "dense"
    said = {}
    for phase in ("decode", "prefill"):
        policy = getattr(sparse, phase)
        if policy is not None:
            own = [field.name for field in dataclasses.fields(policy) if getattr(policy, field.name) != field.default]
            options = ", ".join(f"{name}={getattr(policy, name)}" for name in own)
            said[phase] = f"{policy.name}({options})"
    if list(said) == ["decode"]:
        return said["decode"]
    return ", ".join(f"{phase} {policy}" for phase, policy in said.items())


def fitted(tokenizer: Tokenizer, name: str, task: Task, num_tokens: int, seed: int) -> Text:
    """A sample of the task, as long as may be, to a few hundredths.

    Raises:
        ValueError: even the shortest has more tokens, with an answer.
    """
    length = trial = 64
    while True:
        text = _encoded(tokenizer, task(length, seed))
        taken = len(text.token_ids) + max(len(answer.token_ids) for answer in text.answers)
        if length != trial and taken <= num_tokens:
            return text
        if length <= 1:
            raise ValueError(
                f"num_tokens must be at least {taken} for the task {name!r}, got {num_tokens}; raise --num-tokens, or "
                f"name others with --task"
            )
        length = max(1, length * num_tokens // taken if length == trial else length * 97 // 100)
        trial = 0 if length == trial else trial


def _encoded(tokenizer: Tokenizer, sample: Sample) -> Text:
    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    answers = []
    for question, answer in sample.questions:
        asked = encode(answer)
        answers.append(Answer([*encode(question), *asked], len(asked)))
    return Text(tokenizer.encode(sample.text), answers)


def _end_of(tokenizer: Tokenizer, text: str, num_tokens: int) -> Text:
    token_ids = tokenizer.encode(text)[:num_tokens]
    if len(token_ids) < num_tokens:
        raise ValueError(
            f"text must have at least {num_tokens} tokens, got {len(token_ids)}; lengthen it, or lower --num-tokens"
        )
    num_told = min(MOST_TOLD, num_tokens // 4)
    return Text(token_ids[:-num_told], [Answer(token_ids[-num_told:], num_told)])
