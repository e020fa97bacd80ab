"""Checkpoints of every format into parameters on device: `load`, and `convert` between formats."""

from jaxserve.weights.convert import convert as convert
from jaxserve.weights.loader import LoadedModel as LoadedModel, load as load
