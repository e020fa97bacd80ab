"""The state machine has teeth: each fault planted here makes it fail."""

import dataclasses

import pytest
from hypothesis import Phase
from machine import machine, run

from jaxserve.scheduler import LayeredPrefill, PagePool, PageUpdate, Scheduler, prefix_cache
from jaxserve.scheduler.layered import borders


class PublishesAtDispatch(Scheduler):
    """Pages are found before the step that writes them has committed."""

    def _seal(self, draft):
        plan = super()._seal(draft)
        for row in plan.prefill:
            if plan.completes:
                self.cache.publish(row.request, row.start + len(row.token_ids))
        return plan


class PublishesBeforeTheLastLayer(Scheduler):
    """Pages are found while upper layers are still to be written."""

    def commit(self, plan, result, now):
        for row in plan.prefill:
            if row.request.epoch == row.epoch:
                self._take_chunk(row, computes_last_again=False)
        return super().commit(plan, result, now)


class SharesAnswers(Scheduler):
    """Pages of answers are found as those of prompts, though they are not to be shared."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.cache._share_answers = True


class RunsHeldRequests(Scheduler):
    def add(self, request):
        held, request.held = request.held, False
        super().add(request)
        request.held = held


class FreesAtOnce(PagePool):
    """Pages do not wait for the steps in flight that name them."""

    def free(self, pages, fence):
        super().free(pages, 0)


class LosesPages(PagePool):
    def free(self, pages, fence):
        super().free(pages[:3], fence)


class GivesASlotTwice(Scheduler):
    def finish(self, request, finish_reason, stop_reason=None):
        if request.slot >= 0:
            self.running.free_slots.append(request.slot)
        super().finish(request, finish_reason, stop_reason)


class ForgetsToAnnounceSlots(Scheduler):
    """The device goes on with the state of the slot's last owner."""

    def _seal(self, draft):
        draft.new_slots = [request for request in draft.new_slots if not request.num_preemptions]
        return super()._seal(draft)


class WritesWrongPageIndex(Scheduler):
    """The second and later pages of a growing table land one place too far."""

    def _append_pages(self, request, pages, draft):
        index = len(request.page_ids)
        super()._append_pages(request, pages, draft)
        if index and draft.page_updates:
            last = draft.page_updates[-1]
            draft.page_updates[-1] = PageUpdate(last.slot, last.index + 1, last.page_id)


class TakesResultsOfOldEpochs(Scheduler):
    """A pre-empted request takes the token that was in flight, and computes it again as well."""

    def commit(self, plan, result, now):
        decode = [row._replace(epoch=row.request.epoch) for row in plan.decode]
        return super().commit(dataclasses.replace(plan, decode=decode), result, now)


class KeepsTheVictimInTheStep(Scheduler):
    """A request that is pre-empted after it was scheduled keeps its row in the plan."""

    def _preempt(self, victim, draft):
        prefill, decode = dict(draft.prefill), list(draft.decode)
        super()._preempt(victim, draft)
        draft.prefill, draft.decode = prefill, decode


class CountsIdleHitsAsFree(Scheduler):
    """Prefix hits that lie in the free list are taken for pages that can still be allocated."""

    def _has_pages(self, hits, num_tokens):
        return super()._has_pages(hits, num_tokens - self.pool.num_idle(hits) * self.pool.page_size)


class PreemptsTheFirst(Scheduler):
    """The victim is the first in the order, so that nobody is sure to get on."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.running.last = lambda: min(self.running, key=lambda request: request.order)


SCHEDULERS = [
    PublishesAtDispatch,
    PublishesBeforeTheLastLayer,
    GivesASlotTwice,
    ForgetsToAnnounceSlots,
    WritesWrongPageIndex,
    TakesResultsOfOldEpochs,
    KeepsTheVictimInTheStep,
    CountsIdleHitsAsFree,
    PreemptsTheFirst,
    RunsHeldRequests,
    SharesAnswers,
]


def machine_fails(scheduler=Scheduler, pool=PagePool) -> None:
    with pytest.raises((AssertionError, IndexError)):  # a fault may trip the scheduler before the checks
        # One failure is enough: no shrinking.
        run(machine(scheduler, pool), max_examples=3000, derandomize=True, database=None, phases=[Phase.generate])


@pytest.mark.parametrize("fault", SCHEDULERS)
def test_machine_catches_a_scheduler_that(fault):
    machine_fails(scheduler=fault)


@pytest.mark.parametrize("fault", [FreesAtOnce, LosesPages])
def test_machine_catches_a_pool_that(fault):
    machine_fails(pool=fault)


def test_machine_catches_keys_without_salt(monkeypatch):
    monkeypatch.setattr(prefix_cache, "root_key", lambda adapter, cache_salt: b"root")
    machine_fails()


def test_machine_catches_keys_without_parent(monkeypatch):
    page_key = prefix_cache.page_key
    monkeypatch.setattr(prefix_cache, "page_key", lambda parent, token_ids: page_key(b"", token_ids))
    machine_fails()


def test_machine_catches_cohorts_that_end_one_group_early(monkeypatch):
    turn = LayeredPrefill.turn

    def early(self, draft):
        found = turn(self, draft)
        return found._replace(completes=found.completes or len(self._in_flight[found.cohort]) == 2)

    monkeypatch.setattr(LayeredPrefill, "turn", early)
    machine_fails()


def test_machine_catches_a_cohort_that_begins_anew_when_it_was_overtaken(monkeypatch):
    choose = LayeredPrefill.choose

    def forgetful(self, draft, candidates):
        found = choose(self, draft, candidates)
        for cohort in self._in_flight:
            if found[1] is not cohort:
                self._in_flight[cohort] = borders(self._num_layers, 2)
        return found

    monkeypatch.setattr(LayeredPrefill, "choose", forgetful)
    machine_fails()
