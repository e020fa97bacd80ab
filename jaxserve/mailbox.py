"""Between an engine and one reader: unread outputs merge, so that a slow reader costs no memory."""

import asyncio

import msgspec

from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.sampling_params import RequestOutputKind


class Mailbox:
    """Holds at most one output, and the error that ended the request."""

    def __init__(self, kind: RequestOutputKind):
        self._kind = kind
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self._filled = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        if self._output is not None and self._kind is RequestOutputKind.DELTA:
            output = merge_deltas(self._output, output)
        self._output = output
        self._filled.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._filled.set()

    async def take(self) -> RequestOutput:
        """Waits for an output. Raises the error of `fail`, unless the last output came before it."""
        await self._filled.wait()
        self._filled.clear()
        output, self._output = self._output, None
        if self._error is not None and not (output is not None and output.finished):
            raise self._error
        assert output is not None
        return output


def merge_deltas(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """The one DELTA output that says what two say, sample by sample."""
    samples = {sample.index: sample for sample in first.outputs}
    for new in second.outputs:
        old = samples.get(new.index)
        samples[new.index] = new if old is None else _merge_samples(old, new)
    return msgspec.structs.replace(
        second,
        outputs=[samples[index] for index in sorted(samples)],
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
    )


def _merge_samples(old: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    return msgspec.structs.replace(
        new,
        text=old.text + new.text,
        token_ids=[*old.token_ids, *new.token_ids],
        logprobs=None if new.logprobs is None else [*(old.logprobs or ()), *new.logprobs],
    )
