"""The scheduler: which tokens of which requests the next step computes. A state machine without I/O or clock.

How this works. `schedule` drafts a step: every running sequence that has finished its prompt gets one decode row; what
is left of the token budget goes to prompts, running ones first, then new ones from the head of the queue. With
`prioritize_prefill` the prompts come first, and the decodes join them where the budget holds all of them. `commit`
takes the step's tokens, publishes full pages and ends requests. With overlap, `schedule` for step n+1 comes before the
`commit` of step n. So a plan is made from what the host knows for sure: how many tokens there will be, not which ones.
A request that turns out to have ended leaves one row too many in flight; its epoch is over and the result is dropped.

Everybody has one place in one order, (priority, arrival): who comes first is served first, who comes last is pre-empted
first. So the first running request always gets on, and with it everything.

Who owns what: the pool owns pages and fences, the prefix cache keys, the queue waiting requests, the prefill policy
the cutting of prompts. The scheduler owns slots, running requests and every change of a `Request`.
"""

import heapq
from collections.abc import Iterable
from typing import Any

from jaxserve.scheduler.chunked import ChunkedPrefill
from jaxserve.scheduler.config import SchedulerConfig
from jaxserve.scheduler.pages import PagePool
from jaxserve.scheduler.plan import Draft, PageUpdate, PrefillRow, RequestUpdate, StepPlan, StepResult
from jaxserve.scheduler.prefix_cache import PrefixCache
from jaxserve.scheduler.request import Request, Status
from jaxserve.scheduler.running import RunningSet
from jaxserve.scheduler.stats import SchedulerStats
from jaxserve.scheduler.waiting import WaitingQueue

LOOK_AHEAD = 64  # waiting requests, in the order of the queue, among which the prefill policy may choose


class Scheduler:
    """Continuous batching over one page pool.

    The engine calls `schedule`, runs the plan and hands it back to `commit` with its result: every plan, in order,
    also when all its requests have ended (its commit returns their pages).
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: PagePool,
        *,
        enable_prefix_caching: bool = True,
        prefill: ChunkedPrefill | None = None,
    ):
        assert prefill is not None or config.prefill == "chunked", "only the engine knows the layers and programs"
        self.config = config
        self.pool = pool
        self.cache = PrefixCache(pool, enabled=enable_prefix_caching, share_answers=config.share_answers)
        self.waiting = WaitingQueue(config.max_num_queued_reqs, config.max_num_queued_tokens)
        self.running = RunningSet(config.max_num_seqs)
        self._prefill = prefill or ChunkedPrefill(config)
        self._watermark_pages = int(config.watermark * pool.num_usable)
        self._step = 0  # the last step planned, which counts as dispatched
        self._is_short = False  # the last draft found too few pages: decodes get theirs before prompts take more
        self._num_kv_tokens = 0  # that the decode rows of the last step read
        self._num_added = 0
        self._deadlines: list[tuple[float, int, Request]] = []  # a heap; ended requests leave when they come up
        self._expired: list[RequestUpdate] = []  # ends by deadline that no commit has reported yet
        self._num_preemptions = self._prefix_queries = self._prefix_hits = 0

    # The engine's side

    def add(self, request: Request) -> None:
        """Queues `request`; the scheduler owns its state from here on.

        Raises:
            ValueError: the prompt is empty or not shorter than max_model_len.
            PoolTooSmall: the prompt is larger than the whole pool.
            QueueFull: a queue limit is reached.
        """
        request.set_limits(self.config.max_model_len, self.pool.num_usable * self.pool.page_size)
        self.waiting.check_room(request)
        self._num_added += 1
        request.order = (request.priority if self.config.policy == "priority" else 0, self._num_added)
        self.cache.enter(request)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, self._num_added, request))
        if request.leader is not None and self._follows(request, request.leader):
            self.waiting.push_follower(request, request.leader)
        else:
            request.leader = None
            self.waiting.push(request)

    def finish(self, request: Request, finish_reason: str, stop_reason: int | str | None = None) -> None:
        """Ends `request` in whatever state it is; no-op if it has ended. Results still in flight are dropped."""
        if request.status is Status.FINISHED:
            return
        if request.status is Status.RUNNING:
            self._leave(request)
        else:
            self.waiting.remove(request)
        request.status = Status.FINISHED
        request.finish_reason, request.stop_reason = finish_reason, stop_reason
        self.waiting.call_followers(request)

    def release(self, request: Request) -> None:
        """Lets a request go that was added as `held`: from now on it waits for nothing but its turn."""
        self.waiting.release(request)

    def has_unfinished(self) -> bool:
        """Whether a request runs or waits, or an end by deadline is still to be reported."""
        return bool(len(self.running) or len(self.waiting) or self._expired)

    def reset_prefix_cache(self) -> bool:
        """Forgets all published pages. False (and no change) while a request or a step in flight holds any page."""
        return self.pool.forget_all()

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_requests_running=len(self.running),
            num_requests_waiting=len(self.waiting),
            kv_cache_usage_perc=self.pool.num_held / self.pool.num_usable,
            num_preemptions=self._num_preemptions,
            prefix_cache_queries=self._prefix_queries,
            prefix_cache_hits=self._prefix_hits,
        )

    def _follows(self, request: Request, leader: Request) -> bool:
        if leader.status is Status.FINISHED or not self.cache.can_share(request):
            return False
        return not self.cache.has_published_prompt(leader)

    def expired(self) -> list[RequestUpdate]:
        """Ends by deadline that no commit has reported; for when `schedule` gives None and nothing is in flight."""
        expired, self._expired = self._expired, []
        return expired

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] < now:
            request = heapq.heappop(self._deadlines)[2]
            if request.status is not Status.FINISHED:
                self.finish(request, "abort", "deadline")
                self._expired.append(RequestUpdate(request, [], "abort", "deadline"))

    # Before the step

    def schedule(self, now: float) -> StepPlan | None:
        """The next step; None if there is nothing to do before another commit or arrival."""
        self._expire(now)
        draft = Draft(
            step=self._step + 1,
            config=self.config,
            now=now,
            num_decodes=len(self.running.decoding),
            num_kv_tokens=self._num_kv_tokens,
        )
        prompts_first = self.config.prioritize_prefill and not self._is_short
        if not prompts_first:
            self._place_decodes(draft)
        self._place_prompts(draft)
        if prompts_first and self.config.tokens_for(len(self.running.decoding)) <= draft.budget:
            self._place_decodes(draft)
        self._is_short = not draft.admits
        if not draft.decode and not draft.prefill:
            return None
        return self._seal(draft)

    def _place_decodes(self, draft: Draft) -> None:
        step, place, num_kv_tokens = draft.step, draft.decode.append, 0
        for row in list(self.running.decoding.values()):  # a copy: finding a page may pre-empt those behind
            request, epoch, _ = row
            num_computed = request.num_computed_tokens
            if num_computed >= request.max_computed_tokens or request.epoch != epoch:
                continue  # its last token is in flight, or it was pre-empted just now
            if num_computed >= request.capacity and not self._grow(request, num_computed + 1, draft):
                continue
            request.num_computed_tokens = num_computed = num_computed + 1
            request.num_in_flight += 1
            request.last_step = step
            num_kv_tokens += num_computed
            place(row)
        draft.num_kv_tokens = self._num_kv_tokens = num_kv_tokens

    def _place_prompts(self, draft: Draft) -> None:
        """The cohort in flight, or those who begin or go on: running prompts, then waiting ones, as the policy says."""
        for draft.in_order in (self._is_short, True):
            candidates = [*self.running.prefilling]
            if self.running.free_slots and draft.admits:
                candidates += self.waiting.head(max(LOOK_AHEAD, self.config.max_prefill_seqs))
            chosen, goes_on = self._prefill.choose(draft, candidates)
            self._begin(draft, chosen)
            if not draft.prefill and goes_on is not None and (live := goes_on.live()):
                draft.cohort, draft.prefill = goes_on, live
            if draft.prefill or draft.decode:
                return  # else those behind others may have found no pages, and the first in the order can take theirs

    def _begin(self, draft: Draft, chosen: Iterable[Request]) -> None:
        for request in chosen:
            if draft.budget <= 0 or len(draft.prefill) == self.config.max_prefill_seqs:
                return
            if request.status is Status.RUNNING:
                self._go_on(request, draft)
            elif not draft.admits or not self._admit(request, draft):
                return

    def _go_on(self, request: Request, draft: Draft) -> None:
        start = request.num_computed_tokens
        num_tokens = self._prefill.num_query_tokens(request, request.num_tokens - start, draft)
        if num_tokens and self._grow(request, start + num_tokens, draft):
            draft.prefill[request] = num_tokens

    def _admit(self, request: Request, draft: Draft) -> bool:
        """From the queue into this step, if there is a slot and there are pages."""
        if not self.running.free_slots:
            return False
        hits = self.cache.match(request)
        start = len(hits) * self.pool.page_size
        num_tokens = self._prefill.num_query_tokens(request, request.num_tokens - start, draft)
        end = request.num_tokens if self.config.reserve_full_isl else start + num_tokens
        if not num_tokens or not self._has_pages(hits, end):
            return False
        self._start(request, hits, draft.now)
        draft.new_slots.append(request)
        self._append_pages(request, hits, draft)
        grown = self._grow(request, end, draft)
        assert grown, "the pages were there just now"
        draft.prefill[request] = num_tokens
        return True

    def _has_pages(self, hits: list[int], num_tokens: int) -> bool:
        """Whether `num_tokens` tokens that begin with `hits` fit; hits that nobody holds use up free pages as well."""
        num_pages = -(-num_tokens // self.pool.page_size) - len(hits) + self.pool.num_idle(hits)
        spare = self._watermark_pages if len(self.running) else 0  # a lone request may have all
        return num_pages + spare <= self.pool.num_available

    def _start(self, request: Request, hits: list[int], now: float) -> None:
        """From the queue into a slot, with `hits` as the first pages."""
        self.waiting.remove(request)
        self.running.start(request)
        request.status = Status.RUNNING
        request.pages_by_rank = [0] * self.pool.num_ranks
        self.pool.acquire(hits, request.pages_by_rank)
        self.cache.start(request, len(hits))
        request.num_computed_tokens = len(hits) * self.pool.page_size
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
            request.num_cached_tokens = request.num_computed_tokens
            if self.cache.enabled and not request.skip_reading_prefix_cache:
                self._prefix_queries += request.num_tokens
                self._prefix_hits += request.num_cached_tokens

    def _grow(self, request: Request, num_tokens: int, draft: Draft) -> bool:
        """Gets pages for the first `num_tokens` tokens, pre-empting from the end of the order. False: not in this step.

        Pages of a victim that is in flight come back only with a commit. Then `request` waits for them, rather than
        taking more victims; so does the last in the order, rather than giving up what it has for nobody.
        """
        missing = -(-num_tokens // self.pool.page_size) - len(request.page_ids)
        if missing <= 0:
            return True
        while (pages := self.pool.allocate(missing, request.pages_by_rank)) is None:
            draft.admits = False
            num_short = draft.num_pages_short + missing - self.pool.num_available
            victim = self.running.last()
            if victim is request or self.pool.num_returning() >= num_short:
                draft.num_pages_short = num_short
                return False
            self._preempt(victim, draft)
        self._append_pages(request, pages, draft)
        return True

    def _append_pages(self, request: Request, pages: list[int], draft: Draft) -> None:
        index = len(request.page_ids)
        draft.page_updates += [PageUpdate(request.slot, index + i, page) for i, page in enumerate(pages)]
        request.page_ids += pages
        request.capacity = len(request.page_ids) * self.pool.page_size

    def _preempt(self, victim: Request, draft: Draft) -> None:
        """Back to its place in the queue, to be computed anew; what it had in this step is withdrawn."""
        draft.withdraw(victim, self.running.row(victim))
        self._leave(victim)
        victim.status = Status.WAITING
        victim.num_preemptions += 1
        self._num_preemptions += 1
        self.waiting.push(victim)

    def _leave(self, request: Request) -> None:
        """Takes a running request's slot and pages, and makes its results in flight void."""
        self.running.stop(request)
        # A step that is still a draft names nothing: only dispatched ones are waited for.
        self.pool.free(request.page_ids, fence=min(request.last_step, self._step))
        request.page_ids, request.capacity = [], 0
        request.num_computed_tokens = request.num_in_flight = 0
        request.epoch += 1

    def _seal(self, draft: Draft) -> StepPlan:
        turn = self._prefill.turn(draft) if draft.prefill else None
        completes = turn is None or turn.completes
        prefill = [self._prefill_row(request, num_tokens, completes) for request, num_tokens in draft.prefill.items()]
        for row in prefill:
            row.request.last_step = draft.step
            if completes:
                row.request.num_computed_tokens += len(row.token_ids)
            if row.samples:
                row.request.num_in_flight += 1
                self.running.start_decoding(row.request)
        self._step = draft.step
        return draft.seal(prefill, turn)

    def _prefill_row(self, request: Request, num_tokens: int, completes: bool) -> PrefillRow:
        start, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        samples = completes and end == request.num_tokens
        return PrefillRow(request, request.epoch, request.slot, start, request.token_slice(start, end), samples)

    # After the step

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[RequestUpdate]:
        """Takes in the results of `plan`; plans come in the order in which they were made.

        Returns an update for every request that got tokens or ended in it, and for every end by deadline so far.
        Requests that `finish` ended are not reported.
        """
        self.pool.commit(plan.step)
        tokens, logprobs = result.token_ids, result.logprobs
        updates = []
        for i, row in enumerate(plan.decode):
            if row.request.epoch == row.epoch:
                updates.append(self._take_tokens(row.request, tokens[i], logprobs[i] if logprobs else None))
        for i, row in enumerate(plan.prefill, start=len(plan.decode)):
            if row.request.epoch != row.epoch:
                continue
            if plan.completes:
                self._take_chunk(row, computes_last_again=row.samples and not tokens[i])
            if row.samples:
                updates.append(self._take_tokens(row.request, tokens[i], logprobs[i] if logprobs else None))
        self._expire(now)
        return updates + self.expired()

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Tells the prefill policy how long the step took, from the step before it or its own start, to its result."""
        self._prefill.observe(plan, seconds)

    def _take_chunk(self, row: PrefillRow, *, computes_last_again: bool) -> None:
        """The KV of these tokens is written through the last layer.

        A row that got no token computes its last one again: the page that holds it is not yet fit to be shared.
        """
        request, num_written = row.request, row.start + len(row.token_ids)
        num_final = num_written - computes_last_again
        if num_final >= request.publish_at:
            self.cache.publish(request, num_final)
        if num_written >= request.num_prompt_tokens:
            self.waiting.call_followers(request)

    def _take_tokens(self, request: Request, token_ids: list[int], logprobs: Any) -> RequestUpdate:
        """0..q sampled tokens of one row, up to the first that ends the request: EOS, then stop ids, then length.

        A negative token says that none could be sampled: the request ends as "error".
        """
        outputs, stops = request.output_token_ids, request.stops
        num_before = num_outputs = len(outputs)
        finish_reason = stop_reason = None
        for token in token_ids:
            if token < 0:
                finish_reason = "error"
                break
            outputs.append(token)
            num_outputs += 1
            if token in stops and num_outputs >= request.min_tokens:
                finish_reason, stop_reason = "stop", stops[token]
                break
            if num_outputs >= request.max_output_tokens:
                finish_reason = "length"
                break
        num_new = num_outputs - num_before
        request.num_in_flight -= 1
        request.num_computed_tokens += num_new - 1  # one was expected
        num_written = request.num_prompt_tokens + num_outputs - 1
        if num_written >= request.publish_at:
            self.cache.publish(request, num_written)
        if finish_reason is not None:
            self.finish(request, finish_reason, stop_reason)
            token_ids = token_ids[:num_new]
        return RequestUpdate(request, token_ids, finish_reason, stop_reason, logprobs)
