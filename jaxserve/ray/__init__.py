"""Fleets of engines on Ray: `generate` for batch inference in Ray Data, `build_app` for a service in Ray Serve."""

from jaxserve.ray.data import generate

__all__ = ["generate"]
