"""Host time that 64 rows under a JSON schema add to a step, by step of random answers.

Reported: the masks of all rows (they are worked out while the device computes the step), and the advance over their
tokens after it.

    python -m benchmarks.structured_output
"""

import statistics
import time

import numpy as np

from benchmarks._report import Row, report
from jaxserve.core_types import CoreRequest
from jaxserve.grammars import Grammars
from jaxserve.sampling_params import SamplingParams
from jaxserve.weights.loader import open_tokenizer

NUM_ROWS, NUM_STEPS = 64, 200
TARGET_MS = 1.0  # of the 4 ms that an 8B model takes for a step on an H200
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "code": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
    },
    "required": ["name", "age", "email", "code", "tags"],
}


def measure() -> tuple[list[float], list[float]]:
    """Milliseconds of each step: (masks, advance)."""
    tokenizer = open_tokenizer("smollm2-135m", revision=None)
    grammars, rng = Grammars(tokenizer, tokenizer.vocab_size, [2]), np.random.default_rng(0)
    params = SamplingParams(structured_outputs={"json": SCHEMA})
    next_id, running, masks_ms, advance_ms = 0, [], [], []
    for _ in range(NUM_STEPS):
        held = set(range(next_id, next_id + NUM_ROWS - len(running)))
        next_id += len(held)
        for seq_id in held:
            request = CoreRequest(seq_id=seq_id, prompt_token_ids=[1], params=params, eos_token_ids=[2])
            grammars.check(request)
            grammars.add(request)
            running.append(seq_id)
        while held:
            grammars.wait()
            held -= {seq_id for seq_id, _ in grammars.ready()}
        start = time.perf_counter()
        masks = grammars.masks(running)
        masks_ms.append(1e3 * (time.perf_counter() - start))
        bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
        tokens = [int(rng.choice(np.flatnonzero(row))) for row in bits]
        start = time.perf_counter()
        ended = [i for i, token in zip(running, tokens, strict=True) if grammars.advance(i, [token]) is not None]
        advance_ms.append(1e3 * (time.perf_counter() - start))
        for seq_id in ended:
            grammars.drop(seq_id)
            running.remove(seq_id)
    grammars.close()
    return masks_ms, advance_ms


def main() -> None:
    masks_ms, advance_ms = measure()
    values = {
        "structured_masks_64": statistics.median(masks_ms),
        "structured_masks_64_p95": statistics.quantiles(masks_ms, n=20)[-1],
        "structured_advance_64": statistics.median(advance_ms),
    }
    rows = [Row(name=n, value=v, unit="ms", target=TARGET_MS, lower_is_better=True) for n, v in values.items()]
    report(rows)


if __name__ == "__main__":
    main()
