"""Grammars in the engine: compiled off the step loop, and the masks of the tokens that they allow next.

How this works. A pool of threads compiles each grammar once (llguidance lets go of the interpreter's lock meanwhile)
and works out the mask of its first token, often the slowest; so long the request is held. Before its first grammar an
engine reads the vocabulary into llguidance, once, and that does hold the lock: 0.2 s for 49,000 tokens, in which no
step begins. Then every sequence has a matcher of its own, which follows the tokens as they are committed. So it always
stands at the end of `Request.output_token_ids`, and a pre-emption changes nothing for it.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxserve.core_types import CoreRequest
from jaxserve.exceptions import RequestError
from jaxserve.slots import allowed_mask
from jaxserve.structured import LIMITS, grammar_text, import_llguidance, readable, roomy_threads
from jaxserve.structured_params import StructuredOutputsParams
from jaxserve.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

MAX_CACHED = 64  # compiled grammars that are kept
NUM_THREADS = 2
IDLE_WAIT_S = 0.01  # how long an engine that has nothing but grammars to wait for sleeps at a time


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class _Sequence:
    """One sequence under a grammar."""

    compiled: "concurrent.futures.Future[LLMatcher]"
    allowed: np.ndarray | None  # u32 [ceil(V / 32)], what else the request allows
    ends: bool  # EOS ends it; else EOS is left out of its masks where anything else is in them
    matcher: "LLMatcher | None" = None  # from `ready` on


class Grammars:
    """The grammars of one engine's sequences; true while there are any. One thread calls it, compiles run beside.

    Args:
        tokenizer: None for a model without one, which can have no grammars.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]):
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._sequences: dict[int, _Sequence] = {}
        self._waiting: dict[int, _Sequence] = {}  # the part of them that is not ready
        self._cache: collections.OrderedDict[StructuredOutputsParams, concurrent.futures.Future[LLMatcher]] = (
            collections.OrderedDict()
        )
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._reading = threading.Lock()  # so that two first grammars read the vocabulary once

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._sequences

    def __bool__(self) -> bool:
        return bool(self._sequences)

    # Compiling

    def check(self, core: CoreRequest) -> None:
        """Raises RequestError when the sequence asks for a grammar and cannot have one; to be called before `add`."""
        if core.params.structured_outputs is None:
            return
        if self._tokenizer is None:
            raise RequestError("structured_outputs must be None: this model has no tokenizer")
        if self._pool is None:
            self._pool = roomy_threads(NUM_THREADS)

    def add(self, core: CoreRequest) -> None:
        """Starts to compile the grammar of this sequence, if it has one; `ready` tells when it may run."""
        params = core.params
        if params.structured_outputs is not None:
            allowed = None
            if params.allowed_token_ids is not None:
                allowed = allowed_mask(params.allowed_token_ids, self._vocab_size)
            compiled = self._compiled(params.structured_outputs)
            sequence = _Sequence(compiled=compiled, allowed=allowed, ends=bool(core.eos_token_ids))
            self._sequences[core.seq_id] = self._waiting[core.seq_id] = sequence

    def _compiled(self, params: StructuredOutputsParams) -> "concurrent.futures.Future[LLMatcher]":
        if params not in self._cache:
            assert self._pool is not None
            self._cache[params] = self._pool.submit(self._compile, params)
            if len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        self._cache.move_to_end(params)
        return self._cache[params]

    def _compile(self, params: StructuredOutputsParams) -> "LLMatcher":
        """In a thread of the pool."""
        limits = import_llguidance().LLParserLimits(**LIMITS)
        with self._reading:
            vocabulary = self._vocabulary
        matcher = import_llguidance().LLMatcher(vocabulary, grammar_text(params), log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise RequestError(readable(matcher.get_error()))
        return matcher

    @functools.cached_property
    def _vocabulary(self) -> "LLTokenizer":
        assert self._tokenizer is not None
        eos = self._eos_token_ids or [self._size - 1]  # it wants one
        return import_llguidance().LLTokenizer(self._tokenizer.backend.to_str(), n_vocab=self._size, eos_token=eos)

    @property
    def _size(self) -> int:
        """Either vocabulary may be padded beyond the other."""
        return max(self._vocab_size, 0 if self._tokenizer is None else self._tokenizer.vocab_size)

    def ready(self) -> list[tuple[int, str | None]]:
        """(sequence, None or why it cannot run) of those whose compile has ended since the last call."""
        ended = []
        for seq_id, sequence in list(self._waiting.items()):
            if sequence.compiled.done():
                del self._waiting[seq_id]
                error = sequence.compiled.exception()
                if error is None:
                    sequence.matcher = sequence.compiled.result().deep_copy()
                ended.append((seq_id, None if error is None else f"the grammar cannot be used: {error}"))
        return ended

    def wait(self) -> None:
        """Sleeps until a compile ends, but not for long: for an engine that has nothing else to do."""
        compiles = [sequence.compiled for sequence in self._waiting.values()]
        concurrent.futures.wait(compiles, IDLE_WAIT_S, concurrent.futures.FIRST_COMPLETED)

    # Stepping

    def masks(self, seq_ids: Sequence[int]) -> np.ndarray:
        """u32 [n, ceil(V / 32)]: the tokens that may come next, as `slots.allowed_mask` packs them.

        A sequence whose grammar has no way on, or ran into a limit, has no bit set.
        """
        masks = np.zeros((len(seq_ids), -(-self._size // 32)), np.int32)
        sequences = [self._sequences[seq_id] for seq_id in seq_ids]
        matchers = [(sequence.matcher, i) for i, sequence in enumerate(sequences)]
        if matchers:  # none where all of them ended in the step before
            import_llguidance().numpy.fill_next_token_bitmask_par(self._executor, matchers, masks)
        masks = masks.view(np.uint32)[:, : -(-self._vocab_size // 32)]
        for mask, sequence in zip(masks, sequences, strict=True):
            assert sequence.matcher is not None
            if sequence.matcher.is_error():
                mask[:] = 0
            elif not sequence.ends and np.any(mask & ~self._eos_mask):
                mask &= ~self._eos_mask
            if sequence.allowed is not None:
                mask &= sequence.allowed
        return masks

    @functools.cached_property
    def _executor(self) -> "LLExecutor":
        return import_llguidance().LLExecutor()

    @functools.cached_property
    def _eos_mask(self) -> np.ndarray:
        return allowed_mask([t for t in self._vocabulary.eos_tokens if t < self._vocab_size], self._vocab_size)

    def advance(self, seq_id: int, token_ids: Sequence[int]) -> str | None:
        """Takes committed tokens; returns the finish reason when nothing can follow them."""
        matcher = self._sequences[seq_id].matcher
        assert matcher is not None
        if not matcher.consume_tokens(list(token_ids)):
            return "error"
        return "stop" if matcher.is_stopped() else None

    def problem(self, seq_id: int) -> str:
        """Why a sequence cannot go on."""
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            return "no token is left that the sampling parameters allow"
        message = "" if sequence.matcher is None else readable(sequence.matcher.get_error())
        return message or "no token is left that the grammar and the other sampling parameters allow"

    def drop(self, seq_id: int) -> None:
        """The sequence ended."""
        self._sequences.pop(seq_id, None)
        self._waiting.pop(seq_id, None)

    def close(self) -> None:
        """Waits for the compiles that run; others never will."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
