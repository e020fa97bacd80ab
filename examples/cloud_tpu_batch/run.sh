#!/usr/bin/env bash
# One shard of a batch job, on a machine with a TPU: a GKE pod or a Cloud TPU VM, whose startup script this is.
# Safe to run again after anything: the parts that are in OUT are not done again.
set -euo pipefail
export HOME="${HOME:-/root}" PATH="${HOME:-/root}/.local/bin:$PATH"

setting() { # NAME: from the environment, or else from the VM's metadata
  if [ -n "${!1:-}" ]; then
    printf '%s' "${!1}"
  else
    curl --silent --fail --header "Metadata-Flavor: Google" \
      "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"
  fi
}

package=$(setting JAXSERVE) # what pip would install, such as jaxserve[batch]
model=$(setting MODEL)
input=$(setting IN)
output=$(setting OUT)
num_shards=$(setting NUM_SHARDS)
shard_index=$(setting JOB_COMPLETION_INDEX) # GKE sets it

command -v uvx >/dev/null || curl --silent --show-error --fail --location https://astral.sh/uv/install.sh | sh

code=0
uvx --python 3.12 --from "$package" --with "jax[tpu]" --with gcsfs \
  jaxserve batch "$input" "$output" --model "$model" --num-shards "$num_shards" --shard-index "$shard_index" \
  --window-rows 1024 --json || code=$?
[ "$code" -ne 3 ] || code=0 # all rows are done; those that got an error are counted in the output, and stay so
exit "$code"
