"""OpenAI's API on a Ray cluster, two replicas of the engine behind one address.

    cd examples/ray && serve run service:app          # http://127.0.0.1:8000/v1/completions

MODEL names another model; on GPUs or TPUs give each replica its own by `resources`.
"""

import os

import jaxserve.ray

app = jaxserve.ray.build_app(
    os.environ.get("MODEL", "smollm2-135m"),
    replicas=2,
    resources=None,  # {"num_gpus": 1}, or {"resources": {"TPU": 4}}
    max_model_len=1024,
)
