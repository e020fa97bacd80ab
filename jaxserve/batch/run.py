"""The loop of a job: reads windows of rows, keeps the engine busy, writes each part that is complete."""

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import grain

from jaxserve.batch.answers import answer, failure
from jaxserve.batch.order import prefix_order
from jaxserve.batch.parts import Parts
from jaxserve.batch.rows import BadRow, BatchRequest, RowReader, refused
from jaxserve.batch.source import Source
from jaxserve.exceptions import COSTS_ITS_ROW, EngineDeadError, QueueFullError
from jaxserve.llm import interrupts_between_steps
from jaxserve.outputs import RequestOutput

if TYPE_CHECKING:
    from jaxserve.engine import LLMEngine

NUM_READ_THREADS = 4  # hide the latency of an object store
NUM_COUNT_THREADS = 16


@dataclasses.dataclass(kw_only=True, slots=True)
class Totals:
    """What a shard of a job did so far. Tokens and seconds are those of this run alone."""

    num_rows: int  # of this shard
    done_before: int = 0  # rows that earlier runs did
    done: int = 0  # rows, earlier runs included; those that failed, too
    failed: int = 0  # of `done`
    first_failure: str | None = None  # of this run: the row's id and the reason, in one line
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0  # of `prompt_tokens`: found in the prefix cache
    generated_tokens: int = 0
    elapsed_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.generated_tokens / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def remaining_s(self) -> float | None:
        """Time left at the speed of this run; None before it has a speed: the first rows wait for compiles."""
        done_now, left = self.done - self.done_before, self.num_rows - self.done
        return self.elapsed_s * left / done_now if done_now >= 8 or not left else None


def parts_of_shard(source: Source, parts: Parts) -> grain.MapDataset[int]:
    """Numbers of the parts that a shard does: each part belongs to one shard."""
    return grain.MapDataset.range(source.num_parts)[parts.shard :: parts.num_shards]


def count_done(source: Source, parts: Parts) -> Totals:
    """Where the shard stands before it starts.

    Raises:
        OSError: a part cannot be read.
        ValueError: a part is damaged.
    """
    mine = parts_of_shard(source, parts) if source.num_parts > parts.shard else ()
    totals = Totals(num_rows=sum(map(source.rows_in, mine)))
    done = sorted(parts.done)
    if done:
        options = grain.ReadOptions(num_threads=NUM_COUNT_THREADS, prefetch_buffer_size=NUM_COUNT_THREADS)
        counts = grain.MapDataset.source(done).map(parts.count).to_iter_dataset(options)
        for number, (num_rows, failed) in zip(done, counts, strict=True):
            if num_rows != source.rows_in(number):
                raise ValueError(
                    f"{parts.path(number)} is damaged: it should hold {source.rows_in(number)} rows, and has "
                    f"{num_rows}: delete it, and run again"
                )
            totals.done += num_rows
            totals.failed += failed
    totals.done_before = totals.done
    return totals


def run_batch(
    engine: "LLMEngine",
    source: Source,
    parts: Parts,
    totals: Totals,
    *,
    model_name: str,
    seed: int = 0,
    window_rows: int,
    on_progress: Callable[[Totals], None] = lambda totals: None,
) -> None:
    """Does the parts of a shard that are not done yet; `totals`, from `count_done`, grows meanwhile.

    Rows of at most two windows are open: the next one is taken when all rows of one are in the engine, so that it never
    runs dry, but not before the last row of the one before is done. Grain has one more window and a few parts ready.

    Args:
        seed: with a row's number it gives the seed of rows that name none.
        window_rows: rows that are put in order together, rounded to whole parts.
        on_progress: called after every step.

    Raises:
        EngineDeadError: the engine cannot go on. What is written stays; run again.
        OSError: input or output failed. As above.
    """
    parts.begin()
    if totals.done == totals.num_rows:
        return
    read_row = RowReader(
        model_name=model_name,
        tokenizer=engine.tokenizer,
        defaults=engine.default_sampling_params,
        seed=seed,
        repeated=source.repeated,
    )
    windows = (
        parts_of_shard(source, parts)
        .filter(lambda number: number not in parts.done)
        .map(lambda number: (number, [read_row(row) for row in source.read(number)]))
        .to_iter_dataset(grain.ReadOptions(num_threads=NUM_READ_THREADS, prefetch_buffer_size=NUM_READ_THREADS))
        .batch(max(1, window_rows // source.part_rows), batch_fn=list)
    )
    with contextlib.closing(iter(windows)) as iterator, interrupts_between_steps() as let_interrupt:
        _Job(engine, iterator, parts, totals, model_name).run(on_progress, let_interrupt)


Window = list[tuple[int, list[BatchRequest | BadRow]]]  # parts by number


class _Part:
    """A part that is being done: its lines so far."""

    def __init__(self, window: int, num_rows: int):
        self.window, self.num_left = window, num_rows
        self.lines: list[bytes] = [b""] * num_rows

    def put(self, index: int, line: bytes) -> None:
        self.lines[index] = line
        self.num_left -= 1


class _Job:
    def __init__(self, engine: "LLMEngine", windows: Iterator[Window], parts: Parts, totals: Totals, model_name: str):
        self._engine, self._windows, self._parts, self._totals = engine, windows, parts, totals
        self._model_name = model_name
        self._max_in_flight = 2 * engine.core.scheduler.config.max_num_seqs  # sequences: as many wait as run
        self._max_model_len = engine.core.scheduler.config.max_model_len
        self._num_in_flight = self._num_windows = 0
        self._has_more = True
        self._queue: deque[tuple[int, int, BatchRequest]] = deque()  # (part, index in it, what to run)
        self._running: dict[str, tuple[int, int, BatchRequest]] = {}
        self._open: dict[int, _Part] = {}

    def run(self, on_progress: Callable[[Totals], None], let_interrupt: Callable[[], None]) -> None:
        start = time.monotonic()
        try:
            while self._has_more or self._open:
                let_interrupt()
                self._read_ahead()
                self._fill()
                if self._running:
                    self._step()
                self._write()
                self._totals.elapsed_s = time.monotonic() - start
                on_progress(self._totals)
            self._engine.settle()  # reads the overrun of the last step, so that the pool balances
        except EngineDeadError:
            raise
        except BaseException:
            self._engine.abort_request(list(self._running))
            self._engine.settle()
            raise

    def _read_ahead(self) -> None:
        while self._has_more and not self._queue and len({part.window for part in self._open.values()}) < 2:
            window = next(self._windows, None)
            if window is None:
                self._has_more = False
            else:
                self._take(window)

    def _take(self, window: Window) -> None:
        found = []
        for number, rows in window:
            self._open[number] = _Part(self._num_windows, len(rows))
            for index, row in enumerate(rows):
                if isinstance(row, BadRow):
                    self._fail(number, index, row)
                else:
                    found.append((number, index, row))
        self._num_windows += 1
        requests = [request for _, _, request in found]
        lengths = [self._decode_len(request) for request in requests]
        self._queue.extend(found[i] for i in prefix_order([request.prompt for request in requests], lengths))

    def _decode_len(self, request: BatchRequest) -> int:
        """The most tokens that the request may decode; where it names no limit, the context is one."""
        most = request.params.max_tokens
        return request.params.n * (self._max_model_len if most is None else min(most, self._max_model_len))

    def _fill(self) -> None:
        while self._queue:
            number, index, request = self._queue[0]
            if self._running and self._num_in_flight + request.params.n > self._max_in_flight:
                return
            try:
                self._submit(number, index, request)
            except EngineDeadError:  # nobody is left to answer the other rows
                raise
            except COSTS_ITS_ROW as error:
                if isinstance(error, QueueFullError) and self._running:
                    return  # its turn comes
                self._fail(number, index, refused(request.row, error))
            self._queue.popleft()

    def _submit(self, number: int, index: int, request: BatchRequest) -> None:
        row, prompt = request.row, request.prompt
        if row.kind == "chat" and isinstance(prompt, str) and self._engine.tokenizer is not None:
            prompt = self._engine.tokenizer.encode(prompt, add_special_tokens=False)  # the template wrote them
        request_id = f"batch-{row.number}"
        self._engine.add_request(request_id, prompt, request.params)
        self._running[request_id] = (number, index, request)
        self._num_in_flight += request.params.n

    def _step(self) -> None:
        for output in self._engine.step():
            if output.finished:
                number, index, request = self._running.pop(output.request_id)
                self._num_in_flight -= request.params.n
                self._count(output)
                if (failed := next((s for s in output.outputs if s.finish_reason == "error"), None)) is not None:
                    row, why = request.row, str(failed.stop_reason)
                    bad = BadRow(number=row.number, custom_id=row.custom_id, code="generation_failed", message=why)
                    self._fail(number, index, bad)
                else:
                    self._put(number, index, answer(request.row, output, self._model_name))

    def _count(self, output: RequestOutput) -> None:
        self._totals.prompt_tokens += len(output.prompt_token_ids)
        self._totals.cached_prompt_tokens += output.num_cached_tokens
        self._totals.generated_tokens += sum(len(sample.token_ids) for sample in output.outputs)

    def _put(self, number: int, index: int, line: bytes) -> None:
        self._totals.done += 1
        self._open[number].put(index, line)

    def _fail(self, number: int, index: int, row: BadRow) -> None:
        self._totals.failed += 1
        self._totals.first_failure = self._totals.first_failure or " ".join(f"{row.custom_id}: {row.message}".split())
        self._put(number, index, failure(row))

    def _write(self) -> None:
        for number in [number for number, part in self._open.items() if not part.num_left]:
            self._parts.write(number, self._open[number].lines)
            del self._open[number]
