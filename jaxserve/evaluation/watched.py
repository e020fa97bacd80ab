"""What a pass over an answer finds."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

NO_SHARES = np.zeros(3)


class Watched(NamedTuple):
    """What a model says of an answer of T tokens."""

    logprobs: np.ndarray  # f32 [T, V], of each token of the answer, by those before it
    shares: np.ndarray  # [3]: sums of recall and of density, over the rows and layers with a policy, and their number

    @property
    def recall(self) -> float:
        """The share of dense attention's mass on what a token reads: mean of tokens with a policy, heads, layers."""
        return mean_shares(self.shares)[0]

    @property
    def density(self) -> float:
        """The share of the positions before it that a token reads, mean likewise."""
        return mean_shares(self.shares)[1]

    def nll(self, answer: Sequence[int]) -> float:
        """Mean negative log-likelihood of the answer's tokens, in nats."""
        return float(-np.mean(self.logprobs[np.arange(len(answer)), np.asarray(answer)]))

    def kl_from(self, truth: "Watched") -> float:
        """Mean KL(truth || this), in nats."""
        return float(np.mean(np.sum(np.exp(truth.logprobs) * (truth.logprobs - self.logprobs), axis=-1)))

    def says(self, answer: Sequence[int]) -> bool:
        """Whether greedy decoding ends with exactly these tokens."""
        return self.logprobs[-len(answer) :].argmax(axis=-1).tolist() == list(answer)


def mean_shares(shares: np.ndarray) -> tuple[float, float]:
    """Recall and density; 1 where nothing had a policy."""
    recall, density, count = shares
    return (float(recall / count), float(density / count)) if count else (1.0, 1.0)
