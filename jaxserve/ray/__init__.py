"""Fleets of engines on Ray: `generate` for batch inference in Ray Data, `build_app` for a service on Ray Serve."""

from jaxserve.ray.data import generate
from jaxserve.ray.serve import build_app

__all__ = ["build_app", "generate"]
