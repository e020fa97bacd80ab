"""An engine for tests of the commands: one token a step for each running request, no jax."""

import time
from types import SimpleNamespace

from jaxserve.exceptions import RequestError
from jaxserve.metrics import StepRecord
from jaxserve.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxserve.sampling_params import RequestOutputKind, SamplingParams


class FakeTokenizer:
    all_special_ids = (0, 1)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def apply_chat_template(self, messages, *, add_generation_prompt: bool) -> str:
        assert add_generation_prompt
        return "|".join(message["content"] for message in messages)


class FakeEngine:
    """Answers a prompt of length p with "p0 p1 p2 ...", `max_tokens` words of it. `step` calls `on_step` first."""

    def __init__(self, on_step=lambda: None, now=time.monotonic):
        self.default_sampling_params = SamplingParams(temperature=0.25)
        self.tokenizer = FakeTokenizer()
        self.core = self
        self.steps: list[StepRecord] = []
        self.running: dict[str, SimpleNamespace] = {}
        self.aborted: list[str] = []
        self.most_running = self.num_resets = 0
        self._on_step, self._now = on_step, now

    def add_request(self, request_id: str, prompt: list[int], params: SamplingParams) -> None:
        if not prompt:
            raise RequestError("the prompt is empty")
        self.running[request_id] = SimpleNamespace(prompt=prompt, params=params, tokens=[])

    def limits(self) -> SimpleNamespace:
        return SimpleNamespace(vocab_size=50, max_model_len=4096)

    def settle(self) -> list[RequestOutput]:
        return []

    def reset_prefix_cache(self) -> bool:
        assert not self.running
        self.num_resets += 1
        return True

    def recent_steps(self, since: int = 0) -> list[StepRecord]:
        return self.steps[since:]

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def abort_request(self, request_ids: list[str]) -> None:
        self.aborted += [i for i in request_ids if self.running.pop(i, None)]

    def step(self) -> list[RequestOutput]:
        start, rows = self._now(), len(self.running)
        self._on_step()
        self.most_running = max(self.most_running, rows)
        duration, number = self._now() - start, len(self.steps) + 1
        self.steps.append(StepRecord(number, start, duration, rows, 0, 0, 0, 0, rows, rows, 0, 0.0, 5 * rows))
        outputs = [self._advance(request_id) for request_id in list(self.running)]
        return [output for output in outputs if output is not None]

    def _advance(self, request_id: str) -> RequestOutput | None:
        request = self.running[request_id]
        request.tokens.append(len(request.tokens))
        finished = len(request.tokens) == request.params.max_tokens
        if finished:
            del self.running[request_id]
        delta = request.params.output_kind is RequestOutputKind.DELTA
        if not (delta or finished):
            return None
        tokens = request.tokens[-1:] if delta else request.tokens
        text = " ".join(f"{len(request.prompt)}{token}" for token in tokens) + (" " if delta else "")
        sample = CompletionOutput(
            index=0, text=text, token_ids=list(tokens), finish_reason="length" if finished else None
        )
        return RequestOutput(
            request_id=request_id,
            prompt=None,
            prompt_token_ids=request.prompt,
            outputs=[sample],
            finished=finished,
            metrics=RequestMetrics(
                arrival_time=1.0, first_scheduled_time=1.25, first_token_time=1.5, last_token_time=2.5
            ),
        )


class FakeLLM:
    """What the commands use of `jaxserve.LLM`; remembers the options that it was made with."""

    def __init__(self, **options):
        self.options = options
        self.llm_engine = FakeEngine()

    def __enter__(self) -> "FakeLLM":
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def generate(self, prompts, params, *, use_tqdm: bool = True):
        each = params if isinstance(params, list) else [params] * len(prompts)
        for i, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
            self.llm_engine.add_request(str(i), prompt, one)
        done = {}
        while self.llm_engine.has_unfinished_requests():
            done |= {output.request_id: output for output in self.llm_engine.step() if output.finished}
        return [done[str(i)] for i in range(len(prompts))]

    def start_profile(self, directory) -> None:
        self.profile = [str(directory), len(self.llm_engine.steps)]

    def stop_profile(self) -> None:
        self.profile.append(len(self.llm_engine.steps))
