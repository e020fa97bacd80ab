"""OpenAI's API on a Ray cluster, replicas of the engine behind one address.

    cd examples/ray && serve run service:app [model=smollm2-135m] [replicas=2]    # http://127.0.0.1:8000/v1/completions

On GPUs or TPUs give each replica its own by `resources`.
"""

from ray.serve import Application

import jaxserve.ray


def app(arguments: dict[str, str]) -> Application:
    """What `serve run` starts, with the NAME=VALUE that follow it."""
    return jaxserve.ray.build_app(
        arguments.get("model", "smollm2-135m"),
        replicas=int(arguments.get("replicas", 2)),
        resources=None,  # {"num_gpus": 1}, or {"resources": {"TPU": 4}}
        max_model_len=1024,
    )
