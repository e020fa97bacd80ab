"""Fleets of engines on Ray: `generate` for batch inference in Ray Data, `build_app` for a service on Ray Serve."""

from jaxserve.exceptions import how_to_install

try:
    import pyarrow  # noqa: F401 # which Ray Data brings
    import ray.serve  # noqa: F401
    import starlette  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"jaxserve.ray needs Ray ({error}): {how_to_install('ray,server')}") from error

from jaxserve.ray.data import generate
from jaxserve.ray.serve import build_app

__all__ = ["build_app", "generate"]
