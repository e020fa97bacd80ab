"""How much sooner 32 mixed requests finish together than one after another.

Prompts of 16 to 256 random tokens, answers of 16 to 96, the demo model, no prefix cache; the same requests in both
runs, all programs compiled before.

    python -m benchmarks.mixed_requests
"""

import time

import numpy as np

from benchmarks._report import Row, report
from jaxserve import LLM, SamplingParams

NUM_REQUESTS, TARGET_RATIO = 32, 4.0


def requests(vocab_size: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts and their sampling, the same each time."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(100, vocab_size, rng.integers(16, 257)).tolist() for _ in range(NUM_REQUESTS)]
    params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=int(rng.integers(16, 97))) for _ in prompts]
    return prompts, params


def timed(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> float:
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - began


def main() -> None:
    with LLM("smollm2-135m", max_model_len=512, enable_prefix_caching=False, warm_up="blocking") as llm:
        prompts, params = requests(llm.get_tokenizer().vocab_size)
        timed(llm, prompts[:2], params[:2])
        together = timed(llm, prompts, params)
        alone = sum(timed(llm, [prompt], [one]) for prompt, one in zip(prompts, params, strict=True))
        stalls = llm.get_metrics()["jaxserve:num_stalls"]
    name = f"{NUM_REQUESTS} requests together; peer: one by one"
    report([Row(name=name, value=together, unit="s", peer=alone, target=TARGET_RATIO, lower_is_better=True)])
    assert not stalls, f"{stalls} steps waited for a compile, so these are no figures"


if __name__ == "__main__":
    main()
