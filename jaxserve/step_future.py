"""A step between its dispatch and its commit, and its results as the host reads them."""

import dataclasses
from typing import Any

import numpy as np
from jax import Array

from jaxserve.core_types import TokenLogprobs
from jaxserve.layers.sampler import Sampled
from jaxserve.scheduler.plan import StepPlan, StepResult
from jaxserve.scheduler.request import Request
from jaxserve.step_programs import StepShape


@dataclasses.dataclass(slots=True)
class StepFuture:
    """A step on its way: computed, then sampled. `result()` waits for the device."""

    plan: StepPlan
    shape: StepShape
    hidden: Array | None  # [R, D], until `Runner.sample`
    scored: Sampled | None  # logprobs of the prefill region's next tokens; None: no row asked
    experts_read: Array | None  # i32 [], by all layers; None: the model has no experts
    sampled: Sampled | None = None  # after `Runner.sample`; None: no row of this plan samples

    def result(self) -> StepResult:
        decode, prefill = self.plan.decode, self.plan.prefill
        assert self.hidden is None, "nobody has sampled this step"
        if self.sampled is None:
            return StepResult(token_ids=[[] for _ in prefill])
        tokens = np.asarray(self.sampled.token_ids).tolist()
        rows = [*range(len(decode)), *(self.shape.decode_rows + place for place, _ in self.plan.places())]
        samples = [True] * len(decode) + [row.samples for row in prefill]
        token_ids = [[tokens[row]] if ok else [] for row, ok in zip(rows, samples, strict=True)]
        if self.sampled.logprob is None:
            return StepResult(token_ids=token_ids)
        host = on_host(self.sampled)
        wanted = [row.request.sampling.params.logprobs for row in (*decode, *prefill)]
        logprobs = [
            None if k is None or not ok else [token_logprobs(host, row, k)]
            for row, k, ok in zip(rows, wanted, samples, strict=True)
        ]
        return StepResult(token_ids=token_ids, logprobs=logprobs)

    def num_experts_read(self) -> int:
        """Experts whose weights the step has read, counted by layer; waits for the device."""
        return 0 if self.experts_read is None else int(self.experts_read)

    def prompt_logprobs(self) -> list[tuple[Request, int, list[TokenLogprobs]]]:
        """(request, position of the first, logprobs) of each prefill row that asked; rows of ended epochs left out."""
        found = []
        if self.scored is None:
            return found
        host = on_host(self.scored)
        for row, (_, offset) in zip(self.plan.prefill, self.plan.places(), strict=True):
            if row.request.sampling.params.prompt_logprobs is not None and row.epoch == row.request.epoch:
                k = row.request.sampling.params.prompt_logprobs
                count = min(len(row.token_ids), len(row.request.prompt_token_ids) - 1 - row.start)
                found.append((row.request, row.start + 1, [token_logprobs(host, offset + j, k) for j in range(count)]))
        return found


def on_host(sampled: Sampled) -> Any:
    """The same fields as numpy arrays; waits for the device."""
    return Sampled(*(np.asarray(field) for field in sampled))  # pyright: ignore[reportArgumentType]


def token_logprobs(host: Any, row: int, k: int) -> TokenLogprobs:
    """One row's logprobs, of `on_host`'s arrays; k = -1 is all that the program returned."""
    k = host.top_ids.shape[1] if k == -1 else k
    return TokenLogprobs(
        token_ids=[int(host.token_ids[row]), *host.top_ids[row, :k].tolist()],
        logprobs=[float(host.logprob[row]), *host.top_logprobs[row, :k].tolist()],
        rank=int(host.rank[row]),
    )
