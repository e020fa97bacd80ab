"""Which parameters are held in 8 bits."""

from collections.abc import Iterable, Iterator
from typing import Any

import jax

from jaxserve.layers.quantized import quantize_int8
from jaxserve.weights.checkpoint import LeafPath

MATMULS = ("qkv", "o", "gate_up", "down", "lm_head")


def quantized(
    leaves: Iterable[tuple[LeafPath, jax.Array]], quantization: str, *, tied: bool
) -> Iterator[tuple[LeafPath, Any]]:
    """The leaves, with those that `linear` multiplies by in 8 bits.

    A tied embedding yields two leaves: itself, for lookups, and an 8-bit "lm_head". A router stays as it is: it is
    small and its errors choose other experts.

    Raises:
      NotImplementedError: an unknown kind of quantisation.
    """
    if quantization != "int8":
        raise NotImplementedError(f"quantization must be 'int8' or None, got {quantization!r}")
    for path, leaf in leaves:
        yield path, quantize_int8(leaf) if path[-1] in MATMULS else leaf
        if tied and path == ("embed",):
            yield ("lm_head",), quantize_int8(leaf)
