"""The real text side of an engine over a token core without a model, for batch jobs that run fast; and their output."""

import hashlib
import json
from types import SimpleNamespace

import fsspec
from echo_core import MAX_MODEL_LEN, VOCAB_SIZE, EchoCore, ascii_tokenizer

from jaxserve.core_types import CoreOutput, CoreRequest
from jaxserve.engine import LLMEngine
from jaxserve.input_processor import InputProcessor, RequestLimits
from jaxserve.output_processor import OutputProcessor


class BatchCore(EchoCore):
    """Greedy rows repeat their prompt; the others get tokens of their seed and position, as a sampler would do it."""

    def __init__(self, step_s: float, max_num_seqs: int):
        super().__init__({"step_s": step_s})
        config = SimpleNamespace(max_num_seqs=max_num_seqs, max_model_len=MAX_MODEL_LEN)
        self.scheduler = SimpleNamespace(config=config)
        self.most_running = 0
        self.prompts: list[str] = []  # in the order in which they came

    def add_request(self, request: CoreRequest) -> None:
        super().add_request(request)
        self.prompts.append("".join(map(chr, request.prompt_token_ids)))
        self.most_running = max(self.most_running, len(self._running))

    def finish(self, seq_ids: list[int], reason: str, stop_reason: str | None = None) -> list[CoreOutput]:
        ended = [seq_id for seq_id in seq_ids if seq_id in self._running]
        super().finish(seq_ids, reason, stop_reason)
        return [CoreOutput(seq_id=seq_id, new_token_ids=[], finish_reason=reason) for seq_id in ended]

    def settle(self) -> list[CoreOutput]:
        return []

    def _advance(self, request: CoreRequest) -> CoreOutput:
        position = self._positions[request.seq_id]
        output = super()._advance(request)
        if not request.params.greedy:
            drawn = hashlib.blake2b(f"{request.params.seed}:{position}".encode(), digest_size=1).digest()[0]
            output.new_token_ids = [ord("!") + drawn % 90]
        return output


def make_engine(*, step_s: float = 0.0, max_num_seqs: int = 8) -> LLMEngine:
    engine = LLMEngine.__new__(LLMEngine)  # without the model that its constructor loads
    tokenizer = ascii_tokenizer()
    limits = RequestLimits(vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, max_logprobs=20)
    engine.tokenizer = tokenizer
    engine.core = BatchCore(step_s, max_num_seqs)  # pyright: ignore[reportAttributeAccessIssue]
    engine._inputs = InputProcessor(tokenizer, limits, {"temperature": 0.5})
    engine._outputs = OutputProcessor(tokenizer)
    return engine


def lines_in(url: str) -> list[dict]:
    """All output lines in a folder of parts, in the order of the input."""
    fs, folder = fsspec.core.url_to_fs(url)
    paths = sorted(fs.glob(f"{folder}/part-*.jsonl"), key=lambda path: path.rsplit("-", 1)[1])
    return [json.loads(line) for path in paths for line in fs.cat_file(path).splitlines()]


def without_times(lines: list[dict]) -> list[dict]:
    """The lines without what differs from run to run by right."""
    for line in lines:
        if line["response"]:
            line["response"]["body"].pop("created")
    return lines
