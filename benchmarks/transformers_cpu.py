"""transformers on the demo model and this machine's CPU: the peer figures for `cpu_engine`, from its own environment.

    pip install torch transformers gguf accelerate      # not in jaxserve's environment
    python benchmarks/transformers_cpu.py PATH/SmolLM2-135M-Instruct.Q4_1.gguf

Prints one line of JSON for each dtype: tokens a second of a 512-token prefill, of one decoding sequence and of sixteen
in a batch (32 tokens of prompt, 32 steps), the best of three rounds.
"""

import json
import pathlib
import sys
import time

import torch
from transformers import AutoModelForCausalLM

NUM_STEPS = 32


def timed(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def decode(model, num_seqs: int) -> float:
    """Seconds for NUM_STEPS greedy steps after a prompt of 32 tokens."""
    out = model(torch.randint(0, 40000, (num_seqs, 32)), use_cache=True)
    cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
    start = time.perf_counter()
    for _ in range(NUM_STEPS):
        out = model(token, past_key_values=cache, use_cache=True)
        cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
    return time.perf_counter() - start


@torch.inference_mode()
def rates(model) -> dict[str, float]:
    prompt = torch.randint(0, 40000, (1, 512))
    model(prompt, logits_to_keep=1)
    return {
        "prefill_512": max(512 / timed(lambda: model(prompt, logits_to_keep=1)) for _ in range(3)),
        "decode_1": max(NUM_STEPS / decode(model, 1) for _ in range(3)),
        "decode_16": max(16 * NUM_STEPS / decode(model, 16) for _ in range(3)),
    }


def main(path: pathlib.Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype).eval()
        print(json.dumps({"dtype": str(dtype), **{k: round(v, 1) for k, v in rates(model).items()}}), flush=True)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
