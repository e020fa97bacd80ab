"""How long a step takes, as a sum of what it does; learnt from the steps themselves.

How this works. A step's time is nearly linear in six things: that there is a step, its decode rows, the keys and values
that these read, the share of the layers that prefill rows pass (their weights are read), the prefill rows times that
share, and the query-key pairs of the prefill rows times that share. Each coefficient is at least zero. They minimise
the squared *relative* errors of the steps seen, so that short steps count as much as long ones and a step that was held
up from outside counts for little; and too short a prediction counts more than one that is too long, since whoever asks
wants to keep within a limit. What is kept is the sums of products that least squares needs, of steps with and
without prefill rows apart, each forgetting by and by: a day of steps that only decode does not wipe out what a prompt
costs. Every observation is followed by one round of coordinate descent from the coefficients before.
"""

from typing import NamedTuple

MEMORY = 0.99  # of the sums, each observation: the last hundred steps of a kind are what counts
WEIGHT_OF_TOO_SHORT = 8.0  # of the error of a step that took longer than predicted
NUM_ENOUGH = 8  # observations of steps with prefill rows before anything is predicted


class StepWork(NamedTuple):
    """What a step does."""

    num_decode_rows: int
    num_kv_tokens: int  # whose keys and values the decode rows read
    num_prefill_tokens: int = 0
    num_pairs: float = 0.0  # a query token of a prompt, a token that it attends to
    share: float = 0.0  # of the layers, that the prefill rows pass

    def features(self) -> tuple[float, ...]:
        share = self.share
        rows, pairs = self.num_prefill_tokens * share, self.num_pairs * share
        return 1.0, self.num_decode_rows, self.num_kv_tokens, rows, pairs, share


NUM_FEATURES = 6


class StepTimeModel:
    """Predicts seconds from `StepWork`. Memory and time of a call are constant."""

    def __init__(self) -> None:
        self.coefficients = [0.0] * NUM_FEATURES
        self._sums = {kind: [[0.0] * (NUM_FEATURES + 1) for _ in range(NUM_FEATURES)] for kind in (False, True)}
        self._num_prefills = 0

    def observe(self, work: StepWork, seconds: float) -> None:
        if seconds <= 0.0:
            return
        has_prefill = work.num_prefill_tokens > 0
        self._num_prefills += has_prefill
        features = work.features()
        is_short = self._predict(features) < seconds
        row = [feature / seconds for feature in features]
        row.append(1.0)
        for i, sums in enumerate(self._sums[has_prefill]):
            factor = row[i] * (WEIGHT_OF_TOO_SHORT if is_short else 1.0)
            for j, value in enumerate(row):
                sums[j] = MEMORY * sums[j] + factor * value
        self._improve()

    def _improve(self) -> None:
        """One round of coordinate descent: each coefficient in turn the best for the others as they are."""
        found = self.coefficients
        for i, (plain, mixed) in enumerate(zip(self._sums[False], self._sums[True], strict=True)):
            own = plain[i] + mixed[i]
            if own > 0.0:
                others = sum((plain[j] + mixed[j]) * found[j] for j in range(NUM_FEATURES) if j != i)
                found[i] = max(0.0, (plain[-1] + mixed[-1] - others) / own)

    def seconds(self, work: StepWork) -> float | None:
        """None until enough steps were seen."""
        if self._num_prefills < NUM_ENOUGH:
            return None
        return self._predict(work.features())

    def _predict(self, features: tuple[float, ...]) -> float:
        return sum(c * f for c, f in zip(self.coefficients, features, strict=True))
