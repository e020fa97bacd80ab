"""Bounds and policies of the scheduler."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What one step may hold and who goes first. All counts are tokens unless the name says otherwise.

    Raises:
        ValueError: a field is out of range; the message names it.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_model_len: int = 2048
    max_prefill_seqs: int = 32  # sequences in the prefill region of one step
    policy: Literal["fcfs", "priority"] = "fcfs"  # priority: the LOWER value goes first, ties by arrival
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0  # 0 = no cap on one prompt's tokens in a step
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    reserve_full_isl: bool = True  # admit a prompt only when pages for all of it are free, and take them at once
    watermark: float = 0.0  # share of the pool that admission leaves free
    prioritize_prefill: bool = False  # decodes join a step only when the prompts leave room for all of them
    prefill: Literal["chunked", "layered", "auto"] = "chunked"  # see chunked.py, layered.py; auto: what is quicker
    target_tbt_ms: float | None = None  # of a step with prompts and decodes; None = 512 tokens' work for all layers
    prefill_order: Literal["fcfs", "shortest", "slack"] = "fcfs"  # see overtaking.py; not for chunked prefill
    share_answers: bool = True  # pages with tokens of answers are published too, see prefix_cache.py
    prompt_multiple: int = 1  # prompts are cut into steps after a multiple of it
    padded_decode_rows: tuple[int, ...] = ()  # ascending; what the runner pads the decode rows beside prompts to

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_prefill_seqs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.policy not in ("fcfs", "priority"):
            raise ValueError(f"policy must be 'fcfs' or 'priority', got {self.policy!r}")
        self._check_prefill()
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark must be in [0, 1), got {self.watermark}")
        if self.long_prefill_token_threshold < 0:
            raise ValueError(f"long_prefill_token_threshold must be >= 0, got {self.long_prefill_token_threshold}")
        for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be None or at least 1, got {value}")
        self._check_budget()

    def tokens_for(self, num_decode_rows: int) -> int:
        """What decode rows take of a step's budget: their padding too, lest prompts push a step over its size."""
        return next((rows for rows in self.padded_decode_rows if rows >= num_decode_rows), num_decode_rows)

    def _check_prefill(self) -> None:
        if self.prefill not in ("chunked", "layered", "auto"):
            raise ValueError(f"prefill must be 'chunked', 'layered' or 'auto', got {self.prefill!r}")
        if self.prefill_order not in ("fcfs", "shortest", "slack"):
            raise ValueError(f"prefill_order must be 'fcfs', 'shortest' or 'slack', got {self.prefill_order!r}")
        if self.target_tbt_ms is not None and not self.target_tbt_ms > 0:
            raise ValueError(f"target_tbt_ms must be None or above 0, got {self.target_tbt_ms}")
        if self.prefill == "chunked":
            if self.target_tbt_ms is not None or self.prefill_order != "fcfs":
                raise ValueError(
                    f"target_tbt_ms and prefill_order are for prefill 'layered' or 'auto', got target_tbt_ms "
                    f"{self.target_tbt_ms} and prefill_order {self.prefill_order!r} with 'chunked'"
                )
        elif not self.enable_chunked_prefill:
            raise ValueError(
                f"prefill={self.prefill!r} cuts prompts that are longer than the budget, so enable_chunked_prefill "
                f"must be True, got False"
            )
        elif self.max_num_batched_tokens <= (rows := self.tokens_for(self.max_num_seqs)):
            raise ValueError(
                f"prefill={self.prefill!r} leaves room for max_num_seqs answers: max_num_batched_tokens must be above "
                f"{rows}, got {self.max_num_batched_tokens}; raise it or lower max_num_seqs"
            )

    def _check_budget(self) -> None:
        budget = self.max_num_batched_tokens
        if budget < self.max_num_seqs:  # else decodes alone could starve a prompt for ever
            raise ValueError(
                f"every running sequence must get a token a step: max_num_batched_tokens {budget} < max_num_seqs "
                f"{self.max_num_seqs}; raise the former or lower the latter"
            )
        if self.enable_chunked_prefill:
            least = self.tokens_for(self.max_num_seqs) + self.prompt_multiple
            if self.prompt_multiple > 1 and budget < least:  # else decodes could starve a prompt for ever
                raise ValueError(
                    f"prompts are cut after multiples of {self.prompt_multiple} tokens, so max_num_batched_tokens must "
                    f"be at least {least}, got {budget}; raise it, or lower max_num_seqs or page_size"
                )
            return
        if budget < self.max_model_len:
            raise ValueError(
                f"without chunked prefill a whole prompt must fit one step: max_num_batched_tokens "
                f"{budget} < max_model_len {self.max_model_len}; raise the former or lower the latter"
            )
        if self.long_prefill_token_threshold:
            raise ValueError(
                f"long_prefill_token_threshold cuts prompts, so it must be 0 without chunked prefill, "
                f"got {self.long_prefill_token_threshold}"
            )
