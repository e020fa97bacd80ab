import itertools

import pytest
from scripted import bare, make, request, take

from jaxserve.scheduler import PagePool, PrefixCache, prefix_cache
from jaxserve.scheduler.prefix_cache import page_key, root_key


@pytest.fixture
def count_keys(monkeypatch):
    """The token runs that were hashed."""
    hashed = []
    monkeypatch.setattr(
        prefix_cache, "page_key", lambda parent, tokens: hashed.append(tokens) or page_key(parent, tokens)
    )
    return hashed


def test_root_keys_differ_by_adapter_and_salt_and_their_types():
    fields = [None, "", "a", "aa", "\0", "None"]
    keys = {root_key(adapter, salt) for adapter, salt in itertools.product(fields, fields)}
    assert len(keys) == len(fields) ** 2


def test_page_keys_differ_by_parent_and_tokens():
    root = root_key(None, None)
    assert len({root, page_key(root, [1, 2]), page_key(root, [2, 1]), page_key(page_key(root, [1, 2]), [1, 2])}) == 4


def test_keys_do_not_depend_on_the_process():
    assert root_key(None, "tenant").hex().startswith("4f65e2dd3c68")
    assert page_key(root_key(None, None), [1, 2, 3]).hex().startswith("ab53ebf81e48")


@pytest.mark.parametrize("num_tokens", [8, 9])
def test_last_token_is_always_left_to_compute(num_tokens):
    sim = make()
    prompt = list(range(2, 2 + num_tokens))
    sim.add(request(prompt))
    sim.drain_requests()
    again = request(prompt)
    sim.add(again)
    plan = sim.dispatch()
    (row,) = plan.prefill
    assert row.start == again.num_cached_tokens == (4 if num_tokens == 8 else 8)
    assert row.token_ids == prompt[row.start :]
    sim.drain()


def test_hits_are_counted_in_tokens_at_first_admission_only():
    sim = make(pages_per_rank=6, max_num_seqs=2, reserve_full_isl=False)
    old, young = request([2] * 7, max_tokens=14), request([3] * 5, max_tokens=14)
    sim.add(old)
    sim.add(young)
    while not young.num_preemptions:
        sim.step()
    while young.slot < 0:
        sim.step()
    assert young.num_computed_tokens >= 4  # it found its own first page again
    assert young.num_cached_tokens == 0
    stats = sim.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (12, 0)
    sim.drain()


def test_partial_pages_are_not_shared():
    sim = make()
    sim.add(request([2, 3, 4]))
    sim.drain_requests()
    sim.add(request([2, 3, 4, 5, 6]))
    sim.drain_requests()
    assert sim.scheduler.stats().prefix_cache_hits == 0


def test_output_pages_are_found_by_the_next_turn():
    sim = make()
    first = request([2, 3, 4, 5, 6], max_tokens=8, eos_token_ids=frozenset())
    sim.add(first)
    sim.drain_requests()
    turn = request(first.prompt_token_ids + first.output_token_ids)
    sim.add(turn)
    sim.drain_requests()
    assert turn.num_cached_tokens == 12  # of 13, the last of which was never computed


def test_where_answers_are_not_shared_pages_of_prompts_alone_are_published_and_found():
    sim = make(share_answers=False, pages_per_rank=12, max_num_seqs=2, reserve_full_isl=False)
    first = request([2, 3, 4, 5, 6, 7], max_tokens=12)  # its second page has two tokens of the answer
    sim.add(first)
    sim.drain_requests()
    turn = request(first.prompt_token_ids + first.output_token_ids, max_tokens=1)
    sim.add(turn)
    sim.drain_requests()
    assert turn.num_cached_tokens == 4
    again = request(first.prompt_token_ids, max_tokens=12, sampling=first.sampling)
    sim.add(again)
    while again.num_tokens < 14:
        sim.step()
    assert len(sim.scheduler.cache.match(again)) == 1  # not the pages of `turn`, whose prompt begins with its tokens
    sim.drain()


def test_page_whose_last_token_is_not_written_is_not_published():
    sim = make(overlap=False)
    first = request([2, 3, 4, 5, 6, 7], max_tokens=9, eos_token_ids=frozenset())
    sim.add(first)
    while first.num_tokens < 8:
        sim.step()
    assert len(sim.scheduler.cache.match(request_like(sim, first))) == 1  # page 2 is full of tokens, not of KV
    sim.step()
    assert len(sim.scheduler.cache.match(request_like(sim, first))) == 2
    sim.drain()


def request_like(sim, old):
    new = request(old.prompt_token_ids + old.output_token_ids + [2])
    sim.scheduler.cache.enter(new)
    return new


def test_page_whose_last_token_is_computed_again_is_not_published():
    scheduler = bare()
    waits = request(range(2, 10))
    scheduler.add(waits)
    take(scheduler, scheduler.schedule(0.0), [])  # two full pages are written, but the row got no token
    scheduler.add(request(range(2, 11)))
    plan = scheduler.schedule(0.0)
    assert [row.request for row in plan.decode] == [waits]  # it writes position 7 once more
    assert plan.prefill[0].start == 4
    take(scheduler, plan, [5], [6])
    scheduler.add(request(range(2, 11)))
    assert scheduler.schedule(0.0).prefill[0].start == 8


@pytest.mark.parametrize("options", [{"cache_salt": "b"}, {"adapter": "a"}, {"cache_salt": None}])
def test_other_salt_or_adapter_shares_nothing(options):
    sim = make()
    prompt = list(range(2, 15))
    sim.add(request(prompt, cache_salt="a"))
    sim.drain_requests()
    for salt, num_cached in (("a", 12), (None, 0)):
        other = request(prompt, **({"cache_salt": salt} if salt else options))
        sim.add(other)
        sim.drain_requests()
        assert other.num_cached_tokens == num_cached


def test_request_that_skips_reading_still_publishes():
    sim = make()
    prompt = list(range(2, 15))
    first, second, third = (request(prompt, skip_reading_prefix_cache=skip) for skip in (True, True, False))
    for each in (first, second, third):
        sim.add(each)
        sim.drain_requests()
    assert [each.num_cached_tokens for each in (first, second, third)] == [0, 0, 12]
    assert sim.scheduler.stats().prefix_cache_queries == 13


def test_disabled_cache_publishes_and_finds_nothing(count_keys):
    sim = make(prefix_caching=False)
    for _ in range(2):
        sim.add(request(list(range(2, 15)), max_tokens=6))
        sim.drain_requests()
    stats = sim.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits, sim.pool.num_cached, count_keys) == (0, 0, 0, [])


def test_every_page_is_hashed_once_in_the_life_of_a_request(count_keys):
    sim = make(pages_per_rank=6, max_num_seqs=2, reserve_full_isl=False)
    old, young = request([2] * 7, max_tokens=12), request([3] * 5, max_tokens=12)
    sim.add(old)
    sim.add(young)
    sim.drain()
    assert young.num_preemptions
    for each, token in ((old, 2), (young, 3)):
        runs = [run for run in count_keys if run in chunks(each)]
        assert len(runs) == (each.num_tokens - 1) // 4, token


def chunks(request):
    tokens = request.prompt_token_ids + request.output_token_ids
    return [tokens[i : i + 4] for i in range(0, len(tokens), 4)]


def test_schedule_never_hashes(count_keys):
    sim = make()
    sim.add(request([2] * 9, max_tokens=12))
    while sim.scheduler.has_unfinished():
        before = len(count_keys)
        plan = sim.dispatch()
        assert len(count_keys) == before
        if sim.in_flight and (plan is None or len(sim.in_flight) > 1):
            sim.commit()
    sim.drain()


def test_reset_refuses_while_pages_are_held():
    sim = make()
    prompt = [2] * 9
    sim.add(request(prompt, max_tokens=3))
    sim.step()
    assert not sim.scheduler.reset_prefix_cache()
    sim.drain_requests()
    assert sim.scheduler.reset_prefix_cache()
    again = request(prompt)
    sim.add(again)
    sim.drain()
    assert again.num_cached_tokens == 0


def test_cache_of_its_own_owns_no_pages():
    pool = PagePool(num_pages=4, page_size=4)
    cache = PrefixCache(pool)
    new = request([2] * 9)
    cache.enter(new)
    assert (cache.match(new), len(new.page_keys), pool.num_available) == ([], 2, 3)
