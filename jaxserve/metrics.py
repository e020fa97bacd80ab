"""Counters and gauges of one engine, readable anywhere: `get_metrics()` gives a plain dict, no exporter needed.

Names are vLLM's stems behind `jaxserve:`.
"""

import dataclasses


@dataclasses.dataclass(kw_only=True)
class EngineMetrics:
    """What the engine counts itself; the scheduler's and runner's numbers are joined in `as_dict`."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_steps: int = 0
    iteration_tokens: int = 0  # tokens computed over all steps
    request_success: dict[str, int] = dataclasses.field(default_factory=dict)  # by finish reason

    def as_dict(self, **others: float) -> dict[str, float]:
        values: dict[str, float] = {
            "jaxserve:prompt_tokens": self.prompt_tokens,
            "jaxserve:generation_tokens": self.generation_tokens,
            "jaxserve:num_steps": self.num_steps,
            "jaxserve:iteration_tokens": self.iteration_tokens,
        }
        for reason, count in sorted(self.request_success.items()):
            values[f'jaxserve:request_success{{finished_reason="{reason}"}}'] = count
        return values | {f"jaxserve:{name}": value for name, value in others.items()}
