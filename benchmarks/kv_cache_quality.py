"""What a KV cache in float8 costs in quality: the demo model on a page of text, on CPU.

    paged_fp8_kv_kl   mean KL divergence from a bfloat16 cache over 512 tokens of text, in nats; at most 0.02

Weights and all else are in bfloat16 both times. Every token attends to keys and values that were rounded to float8, its
own too, so decoding loses what prefill does.

    python -m benchmarks.kv_cache_quality
"""

import jax.numpy as jnp

from benchmarks._logprobs import logprobs, mean_kl
from benchmarks._report import Row, report
from benchmarks._text import TEXT
from jaxserve import weights
from jaxserve.weights.demo import DEMO_MODEL
from jaxserve.weights.loader import open_tokenizer

NUM_TOKENS = 512


def main() -> None:
    loaded = weights.load(DEMO_MODEL, dtype=jnp.bfloat16, progress=False)
    text = open_tokenizer(DEMO_MODEL, revision=None).encode(TEXT)[:NUM_TOKENS]
    truth, fp8 = (logprobs(loaded, dtype, text) for dtype in (jnp.bfloat16, jnp.float8_e4m3fn))
    row = Row(name="paged_fp8_kv_kl", value=mean_kl(truth, fp8), unit="nats", target=0.02, lower_is_better=True)
    report([row], title=f"{DEMO_MODEL}, KV cache in float8_e4m3fn beside bfloat16, {NUM_TOKENS} tokens")


if __name__ == "__main__":
    main()
