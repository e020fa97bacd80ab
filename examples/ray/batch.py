"""Batch inference on a Ray cluster: JSONL with a `prompt` or `messages` a row in, JSONL folders with the answers out.

    python examples/ray/batch.py IN OUT [--model smollm2-135m] [--replicas 1] [--max-tokens 64]

Without a cluster, Ray starts one on this machine. A replica takes a CPU of it, and reading the file another. On GPUs or
TPUs give each replica its own, see `resources` below.
"""

import argparse

import jaxserve.ray  # isort: skip # says how to install Ray, where it is missing
import ray


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="IN")
    parser.add_argument("target", metavar="OUT")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()
    answers = jaxserve.ray.generate(
        ray.data.read_json(arguments.source),
        arguments.model,
        replicas=arguments.replicas,
        sampling_params={"temperature": 0.0, "max_tokens": arguments.max_tokens},
        resources=None,  # {"num_gpus": 1}, or {"resources": {"TPU": 4}}
        max_model_len=1024,
    )
    answers.write_json(arguments.target)


if __name__ == "__main__":
    main()
