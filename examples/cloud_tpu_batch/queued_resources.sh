#!/usr/bin/env bash
# A batch job on spot Cloud TPU VMs, one queued resource for each shard.
#   queued_resources.sh create   asks for the VMs that are not there; each runs run.sh when it boots
#   queued_resources.sh list     says where they stand
#   queued_resources.sh delete   gives them back, those that were taken away by a preemption, too
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

NAME=${NAME:-jaxserve-batch}
ZONE=${ZONE:?the zone, such as europe-west4-a}
NUM_SHARDS=${NUM_SHARDS:-1}
ACCELERATOR_TYPE=${ACCELERATOR_TYPE:-v6e-1}
RUNTIME_VERSION=${RUNTIME_VERSION:-v2-alpha-tpuv6e}
JAXSERVE=${JAXSERVE:-jaxserve[batch]}

queued() { # COMMAND SHARD OPTIONS...
  gcloud compute tpus queued-resources "$1" "$NAME-$2" --zone="$ZONE" "${@:3}"
}

create() { # SHARD
  queued create "$1" --node-id="$NAME-$1" --spot --async \
    --accelerator-type="$ACCELERATOR_TYPE" --runtime-version="$RUNTIME_VERSION" \
    --metadata="JAXSERVE=$JAXSERVE,MODEL=$MODEL,IN=$IN,OUT=$OUT,NUM_SHARDS=$NUM_SHARDS,JOB_COMPLETION_INDEX=$1" \
    --metadata-from-file="startup-script=$here/run.sh"
}

case "${1:-}" in
create)
  : "${MODEL:?the model, such as a Hugging Face id}" "${IN:?such as gs://bucket/in}" "${OUT:?such as gs://bucket/out}"
  for ((shard = 0; shard < NUM_SHARDS; shard++)); do
    queued describe "$shard" >/dev/null 2>&1 || create "$shard"
  done
  ;;
list)
  gcloud compute tpus queued-resources list --zone="$ZONE" --filter="name~$NAME"
  ;;
delete)
  for ((shard = 0; shard < NUM_SHARDS; shard++)); do
    queued delete "$shard" --force --quiet --async
  done
  ;;
*)
  sed -n '2,5s/^# *//p' "$0" >&2
  exit 2
  ;;
esac
