"""The demo model on this machine's CPU: jaxserve's engine beside llama.cpp, on the same work in one run.

    prefill_cpu_512   one prompt of 512 tokens to its first token, tokens a second; must be 2.0 times the peer
    tpot_cpu_1        one sequence, time a token; must be 0.3 times as fast as the peer (stretch 0.6)
    offline_cpu_16    sixteen sequences in a batch, tokens a second; must be 1.0 times the peer
    offline_cpu_kl    what the timed weights cost: mean KL divergence to float32 over 512 tokens of text, at most 0.05

The peer runs the same GGUF file (Q4_1) with as many threads, through its low-level batch API, and picks the likeliest
token as jaxserve does. Rounds of both alternate, and medians are compared. Run it on a quiet machine: the peer's
threads wait for each other in busy loops, so that one other process can make it ten times slower, and the ratio absurd.

The second peer, transformers, needs an environment of its own (`benchmarks/transformers_cpu.py`). Version 5.17 with
torch 2.11 on two cores of an AMD EPYC (Zen 4), tokens a second in the order of the first three rows: float32 466, 17,
171; bfloat16 919, 26, 240. jaxserve must be faster than float32 on all three and than bfloat16 on the last two.

    pip install "jaxserve[bench]"        # builds llama-cpp-python from source: needs CMake and a C++ compiler
    python -m benchmarks.cpu_engine [--quantization int8|none] [--rounds 7]
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from benchmarks._logprobs import logprobs, mean_kl
from benchmarks._report import Row, report
from benchmarks._text import TEXT
from jaxserve import weights
from jaxserve.config import EngineConfig
from jaxserve.engine import LLMEngine
from jaxserve.sampling_params import SamplingParams
from jaxserve.weights.demo import DEMO_MODEL, demo_gguf
from jaxserve.weights.loader import open_tokenizer

PROMPT_LEN, NUM_SEQS, SHORT_LEN, NUM_STEPS = 512, 16, 32, 64
PAGE_SIZE = 16


class Jaxserve:
    """The engine, stepped in this process."""

    def __init__(self, quantization: str | None):
        self._engine = LLMEngine(
            EngineConfig.of(
                DEMO_MODEL,
                quantization=quantization,
                max_num_seqs=NUM_SEQS,
                max_num_batched_tokens=PROMPT_LEN,
                page_size=PAGE_SIZE,
                enable_prefix_caching=False,
                warm_up="off",
            )
        )

    def prefill(self, prompt: list[int]) -> float:
        """Seconds to the first token."""
        start = time.perf_counter()
        self._add([prompt], max_tokens=1)
        self._finish()
        return time.perf_counter() - start

    def decode(self, prompts: list[list[int]]) -> float:
        """Seconds a step in which every sequence gets one token."""
        self._add(prompts, max_tokens=NUM_STEPS + 1)
        started: set[str] = set()
        while len(started) < len(prompts):
            started |= {output.request_id for output in self._engine.step()}
        start = time.perf_counter()
        self._finish()
        return (time.perf_counter() - start) / NUM_STEPS

    def _add(self, prompts: list[list[int]], max_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            self._engine.add_request(str(i), prompt, params)

    def _finish(self) -> None:
        while self._engine.has_unfinished_requests():
            self._engine.step()


class LlamaCpp:
    """llama.cpp through its batch API. One context a workload, since its cache is divided among the sequences."""

    def __init__(self) -> None:
        try:
            import llama_cpp
        except ImportError:
            raise SystemExit(
                "cpu_engine compares with llama.cpp, which is not installed: pip install 'jaxserve[bench]' "
                "(it is built from source: CMake and a C++ compiler are needed)"
            ) from None
        self._lib = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)  # kept alive by this reference
        llama_cpp.llama_log_set(self._quiet, None)
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(demo_gguf()).encode(), params)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._contexts: dict[tuple[int, int], object] = {}
        self._batch = llama_cpp.llama_batch_init(PROMPT_LEN, 0, 1)

    def prefill(self, prompt: list[int]) -> float:
        """Seconds to the first token."""
        context = self._context(1, len(prompt))
        start = time.perf_counter()
        self._run(context, [prompt], position=0)
        return time.perf_counter() - start

    def decode(self, prompts: list[list[int]]) -> float:
        """Seconds a step in which every sequence gets one token."""
        length = len(prompts[0])
        context = self._context(len(prompts), length + NUM_STEPS)
        tokens = self._run(context, prompts, position=0)
        start = time.perf_counter()
        for i in range(NUM_STEPS):
            tokens = self._run(context, [[token] for token in tokens], position=length + i)
        return (time.perf_counter() - start) / NUM_STEPS

    def _context(self, num_seqs: int, seq_len: int):
        """An empty context."""
        key = num_seqs, seq_len
        if key not in self._contexts:
            params = self._lib.llama_context_default_params()
            params.n_ctx, params.n_seq_max = num_seqs * max(256, seq_len), num_seqs
            params.n_batch = params.n_ubatch = PROMPT_LEN
            params.n_threads = params.n_threads_batch = num_cores()
            self._contexts[key] = self._lib.llama_init_from_model(self._model, params)
        context = self._contexts[key]
        self._lib.llama_memory_clear(self._lib.llama_get_memory(context), True)
        return context

    def _run(self, context, rows: list[list[int]], position: int) -> list[int]:
        """The likeliest token after each row, rows[i] being the next tokens of sequence i."""
        batch, n = self._batch, 0
        for seq, tokens in enumerate(rows):
            for i, token in enumerate(tokens):
                batch.token[n], batch.pos[n], batch.n_seq_id[n], batch.seq_id[n][0] = token, position + i, 1, seq
                batch.logits[n] = i == len(tokens) - 1
                n += 1
        batch.n_tokens = n
        if self._lib.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        last = np.cumsum([len(tokens) for tokens in rows]) - 1
        logits = (self._lib.llama_get_logits_ith(context, int(i)) for i in last)
        return [int(np.argmax(np.ctypeslib.as_array(row, (self._vocab_size,)))) for row in logits]


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def warn_if_busy() -> None:
    load = os.getloadavg()[0]
    if load > 0.3 * num_cores():
        print(f"warning: the load is {load:.1f} on {num_cores()} cores; these figures will not hold", file=sys.stderr)


def alternate(run: list[Callable[[], float]], rounds: int) -> list[float]:
    """Median seconds of each function, called in turn after one round of warm-up."""
    times = [[f() for f in run] for _ in range(rounds + 1)][1:]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def kl_to_float32(quantization: str | None, token_ids: list[int]) -> float:
    """Mean KL(float32 || timed weights) in nats over the next-token distributions of a text."""
    exact = weights.load(DEMO_MODEL, dtype=jnp.float32, progress=False)
    timed = weights.load(DEMO_MODEL, dtype=jnp.bfloat16, quantization=quantization, progress=False)
    return mean_kl(logprobs(exact, jnp.float32, token_ids), logprobs(timed, jnp.bfloat16, token_ids))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantization", choices=("int8", "none"), default="int8")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    warn_if_busy()
    quantization = None if args.quantization == "none" else args.quantization
    peer, ours = LlamaCpp(), Jaxserve(quantization)
    text = open_tokenizer(DEMO_MODEL, revision=None).encode(TEXT)
    shorts = [text[SHORT_LEN * i : SHORT_LEN * (i + 1)] for i in range(NUM_SEQS)]

    both = (ours, peer)
    prefill = alternate([lambda e=e: e.prefill(text[:PROMPT_LEN]) for e in both], args.rounds)
    single = alternate([lambda e=e: e.decode(shorts[:1]) for e in both], args.rounds)
    batch = alternate([lambda e=e: e.decode(shorts) for e in both], args.rounds)
    (prefill_ours, prefill_peer), (batch_ours, batch_peer) = (
        [tokens / seconds for seconds in times] for tokens, times in ((PROMPT_LEN, prefill), (NUM_SEQS, batch))
    )
    rows = [
        Row(name="prefill_cpu_512", value=prefill_ours, unit="tok/s", peer=prefill_peer, target=2.0),
        Row(
            name="tpot_cpu_1",
            value=single[0] * 1e3,
            unit="ms",
            peer=single[1] * 1e3,
            target=0.3,
            stretch=0.6,
            lower_is_better=True,
        ),
        Row(name="offline_cpu_16", value=batch_ours, unit="tok/s", peer=batch_peer, target=1.0),
        Row(
            name="offline_cpu_kl",
            value=kl_to_float32(quantization, text[:PROMPT_LEN]),
            unit="nats",
            target=0.05,
            lower_is_better=True,
        ),
    ]
    report(rows, title=f"{DEMO_MODEL}, quantization {args.quantization}, {num_cores()} cores, beside llama.cpp")


if __name__ == "__main__":
    main()
