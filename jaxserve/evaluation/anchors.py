"""Which layers are to choose pages for the others, and which of their heads to follow (Kascade, arXiv 2512.16391)."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from jaxserve.layers.sparse.kascade import LargestMass

CHOOSES = LargestMass(percent=0, least=64)  # the paper's 64 tokens


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def page_masses(
    q: Float[Array, "T K G H"], k: Float[Array, "T K H"], scale: float, soft_cap: float | None, page_size: int
) -> Float[Array, "T K P"]:
    """The softmax's mass on each page of a text, summed over a group's heads."""
    scores = scale * jnp.einsum("tkgh,skh->tkgs", q, k)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    T = q.shape[0]
    sees = (jnp.arange(T)[:, None] >= jnp.arange(T)[None])[:, None, None]
    mass = jnp.sum(jax.nn.softmax(jnp.where(sees, scores, -jnp.inf), axis=3), axis=2)
    mass = jnp.pad(mass, ((0, 0), (0, 0), (0, -T % page_size)))
    return jnp.sum(mass.reshape(*mass.shape[:2], -1, page_size), axis=3)


def similarity(masses: Sequence[np.ndarray], page_size: int) -> np.ndarray:
    """`[i, j, h, g]`, for layers `i <= j`: the least share, over the rows, that the pages which head g of layer i
    chooses have in the mass of those which head h of layer j would choose. `masses` [T, K, P] of each layer.
    """
    chosen = [_chosen(mass, page_size) for mass in masses]
    L, K = len(masses), masses[0].shape[1]
    found = np.zeros((L, L, K, K))
    for j, mass in enumerate(masses):
        own = np.sum(mass * chosen[j], axis=2)  # [T, K]
        for i in range(j + 1):
            found[i, j] = np.min(np.einsum("thp,tgp->thg", mass, chosen[i]) / own[:, :, None], axis=0)
    return found


def _chosen(mass: np.ndarray, page_size: int) -> np.ndarray:
    """1 where a row's head chooses a page, [T, K, P]."""
    T, _, P = mass.shape
    lens = jnp.arange(1, T + 1)
    numbers = np.asarray(CHOOSES.pages(lens, page_size, jnp.asarray(mass), 0))
    return (numbers[..., None] == np.arange(P)).any(axis=2).astype(np.float32)


def choose_anchors(
    similarity: np.ndarray, importance: np.ndarray, num_anchors: int
) -> tuple[list[int], list[list[int]]]:
    """The `num_anchors` layers, from 0 on, with the largest sum over all layers of the similarity with the last anchor
    before or at it, of the best head for each head, times the layer's importance; and these heads.
    """
    num_layers = len(importance)
    gains = similarity.max(axis=3).mean(axis=2) * importance[None]  # [anchor, layer]
    before = np.concatenate([np.zeros((num_layers, 1)), np.cumsum(gains, axis=1)], axis=1)
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}  # layers covered: the largest sum, and its anchors
    for _ in range(num_anchors):
        longer: dict[int, tuple[float, list[int]]] = {}
        for anchor, (total, anchors) in best.items():
            for end in range(anchor + 1, num_layers + 1):  # none after all layers
                new = total + before[anchor, end] - before[anchor, anchor]
                if end not in longer or new > longer[end][0]:
                    longer[end] = (new, [*anchors, anchor])
        best = longer
    anchors = best[num_layers][1]
    of_layer = [max(a for a in anchors if a <= layer) for layer in range(num_layers)]
    return anchors, [similarity[a, layer].argmax(axis=1).tolist() for layer, a in enumerate(of_layer)]
