"""Which programs an engine uses: those that serve any plan, and those of layered prefill."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from jaxserve.config import RunnerConfig, prefill_seqs
from jaxserve.layers.sampler import SamplingFeatures
from jaxserve.scheduler import LayeredPrefill
from jaxserve.step_builder import Rows
from jaxserve.step_programs import SampleShape, StepShape

SLOTS_A_CALL = 8
UPDATES_A_CALL = (16, 128, 1024)
MASKS_A_CALL = (8, 64)

Span = tuple[int, int]  # of layers, [lo, hi)


def default_programs(config: RunnerConfig, *, every: bool) -> dict[str, list[Any]]:
    """Keys of programs that together serve whatever may come, by the name of their table.

    With `every` also those that are only faster: the sampling of greedy rows alone.
    """
    shapes = default_shapes(config)
    rows = sorted({shape.sample_rows for shape in shapes})
    everything = SamplingFeatures(random=True, edits=True, num_logprobs=config.max_logprobs)
    kinds = (SamplingFeatures(random=True), everything, *((SamplingFeatures(),) if every else ()))
    return {
        "start_slots": [Rows(SLOTS_A_CALL)],
        "update_tables": [*map(Rows, UPDATES_A_CALL)],
        "forward": shapes,
        "sample": [SampleShape(rows=r, features=f) for f in kinds for r in rows],
        "start_edits": [Rows(1)],
        "update_masks": [*map(Rows, MASKS_A_CALL)],
        "score": [Rows(config.prefill_tokens[-1])],  # stands in for the smaller ones
    }


def default_shapes(config: RunnerConfig) -> list[StepShape]:
    """Decode-only and mixed shapes that cover whatever a plan may hold, cheapest first."""
    rows = [config.min_decode_rows]
    while rows[-1] < config.max_num_seqs:
        rows.append(2 * rows[-1])
    shapes = [(b, 0) for b in rows] + [(b, t) for t in config.prefill_tokens[:-1] for b in config.mixed_decode_rows]
    whole = config.prefill_tokens[-1]
    for b in sorted({*config.mixed_decode_rows, *config.padded_decode_rows}):
        shapes.append((b, whole - b if b in config.padded_decode_rows else whole))
    found = [StepShape(decode_rows=b, prefill_tokens=t, prefill_seqs=prefill_seqs(t) if t else 0) for b, t in shapes]
    return sorted(dict.fromkeys(found), key=lambda shape: shape.cost)


def covering(shapes: Sequence[StepShape], wanted: StepShape) -> StepShape:
    """The cheapest that holds what is wanted."""
    return next(shape for shape in shapes if shape.covers(wanted))


def span_shapes(
    shapes: Sequence[StepShape], num_tokens: int, num_seqs: int, spans: Sequence[Span], *, num_layers: int
) -> list[StepShape]:
    """Those that take a cohort through each of these spans, beside any number of decode rows."""
    rows = max(shape.decode_rows for shape in shapes)
    whole = covering(shapes, StepShape(decode_rows=rows, prefill_tokens=num_tokens, prefill_seqs=num_seqs))
    return [dataclasses.replace(whole, span=span, completes=span[1] == num_layers) for span in spans]


def beside_decodes(shapes: Iterable[StepShape], config: RunnerConfig) -> list[StepShape]:
    """Each of these with every number of decode rows that a step with prompts may have."""
    return [dataclasses.replace(shape, decode_rows=b) for shape in shapes for b in config.mixed_decode_rows]


def cohorts_ahead(policy: LayeredPrefill, config: RunnerConfig) -> list[tuple[int, list[Span]]]:
    """Tokens of cohorts, largest first, and the spans that they will go, as far as the policy can tell."""
    rows = config.max_num_seqs
    sizes = {shape.prefill_tokens for shape in default_shapes(config) if shape.decode_rows == rows}
    return [(size, spans) for size in sorted(sizes, reverse=True) if size for spans in policy.spans_ahead(size)]
