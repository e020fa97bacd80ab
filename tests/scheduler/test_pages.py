import pytest

from jaxserve.scheduler import PagePool


def take(pool, num_pages, pages_by_rank=None):
    pages = pool.allocate(num_pages, [0] * pool.num_ranks if pages_by_rank is None else pages_by_rank)
    assert pages is not None
    pool.check()
    return pages


def test_null_pages_are_never_allocated():
    pool = PagePool(num_pages=12, page_size=4, num_ranks=3)
    assert sorted(take(pool, 9)) == [1, 2, 3, 5, 6, 7, 9, 10, 11]
    assert pool.allocate(1, [0, 0, 0]) is None


def test_failed_allocation_changes_nothing():
    pool = PagePool(num_pages=4, page_size=4)
    counts = [0]
    assert pool.allocate(4, counts) is None
    assert (counts, pool.num_available) == ([0], 3)
    pool.check()


def test_pages_of_a_sequence_spread_evenly_over_ranks():
    pool = PagePool(num_pages=24, page_size=4, num_ranks=3)
    counts = [0, 0, 0]
    pages = take(pool, 6, counts)
    assert counts == [2, 2, 2]
    assert [page // pool.pages_per_rank for page in pages] == [0, 1, 2, 0, 1, 2]


def test_short_sequences_land_on_the_rank_with_most_free():
    pool = PagePool(num_pages=8, page_size=4, num_ranks=2)
    assert [take(pool, 1)[0] // pool.pages_per_rank for _ in range(4)] == [0, 1, 0, 1]


def test_full_rank_is_passed_over():
    pool = PagePool(num_pages=8, page_size=4, num_ranks=2)
    take(pool, 1, [9, 0])
    counts = [0, 9]
    assert [page // pool.pages_per_rank for page in take(pool, 5, counts)] == [0, 0, 0, 1, 1]
    assert counts == [3, 11]


def test_cached_page_can_be_found_until_it_is_reallocated():
    pool = PagePool(num_pages=3, page_size=4)
    (page,) = take(pool, 1)
    pool.publish(page, b"key")
    pool.free([page], fence=0)
    assert (pool.find(b"key"), pool.num_cached) == (page, 1)
    assert page in take(pool, 2)
    assert (pool.find(b"key"), pool.num_cached) == (None, 0)


def test_blank_pages_go_before_cached_ones():
    pool = PagePool(num_pages=5, page_size=4)
    pages = take(pool, 4)
    for page in pages[:2]:
        pool.publish(page, bytes([page]))
    pool.free(pages, fence=0)
    assert set(take(pool, 2)) == set(pages[2:])
    assert all(pool.find(bytes([page])) == page for page in pages[:2])


def test_least_recently_freed_page_is_evicted_first_and_tails_before_prefixes():
    pool = PagePool(num_pages=6, page_size=4)
    first, second = take(pool, 2), take(pool, 3)
    for page in first + second:
        pool.publish(page, bytes([page]))
    pool.free(second, fence=0)
    pool.free(first, fence=0)
    assert take(pool, 5) == [*reversed(second), *reversed(first)]


def test_acquired_page_is_used_most_recently():
    pool = PagePool(num_pages=3, page_size=4)
    a, b = take(pool, 2)
    for page in (a, b):
        pool.publish(page, bytes([page]))
        pool.free([page], fence=0)
    pool.acquire([a], [0])
    pool.free([a], fence=0)
    assert take(pool, 2) == [b, a]


def test_acquiring_an_idle_page_makes_one_less_available_and_a_held_one_does_not():
    pool = PagePool(num_pages=4, page_size=4)
    a, b = take(pool, 2)
    pool.publish(a, b"a")
    pool.publish(b, b"b")
    pool.free([a], fence=0)
    assert pool.num_idle([a, b]) == 1
    counts = [0]
    pool.acquire([a, b], counts)
    pool.check()
    assert (pool.num_available, pool.refs(a), pool.refs(b), counts) == (1, 1, 2, [2])


def test_shared_page_survives_one_owner_finishing():
    pool = PagePool(num_pages=3, page_size=4)
    (page,) = take(pool, 1)
    pool.publish(page, b"key")
    pool.acquire([page], [0])
    pool.free([page], fence=0)
    assert (pool.refs(page), pool.num_available) == (1, 1)


def test_fenced_pages_return_with_the_commit_of_their_step():
    pool = PagePool(num_pages=4, page_size=4)
    pages = take(pool, 3)
    pool.free(pages[:1], fence=2)
    pool.free(pages[1:2], fence=1)
    assert (pool.num_available, pool.num_returning()) == (0, 2)
    pool.commit(1)
    assert (pool.num_available, pool.num_returning()) == (1, 1)
    pool.commit(2)
    assert (pool.num_available, pool.num_returning()) == (2, 0)
    pool.free(pages[2:], fence=2)  # already committed
    assert pool.num_available == 3
    pool.check()


def test_fenced_page_can_still_be_found_and_shared():
    pool = PagePool(num_pages=3, page_size=4)
    (page,) = take(pool, 1)
    pool.publish(page, b"key")
    pool.free([page], fence=1)
    pool.acquire([page], [0])
    assert pool.num_returning() == 0
    pool.commit(1)
    assert (pool.refs(page), pool.num_available) == (1, 1)


def test_first_page_under_a_key_wins():
    pool = PagePool(num_pages=3, page_size=4)
    a, b = take(pool, 2)
    pool.publish(a, b"key")
    pool.publish(b, b"key")
    assert pool.find(b"key") == a
    pool.free([b], fence=0)
    assert pool.num_cached == 0
    pool.check()


def test_forget_all_refuses_while_a_page_is_held_or_fenced():
    pool = PagePool(num_pages=4, page_size=4)
    pages = take(pool, 2)
    for page in pages:
        pool.publish(page, bytes([page]))
    pool.free(pages[:1], fence=0)
    assert not pool.forget_all()
    pool.free(pages[1:], fence=1)
    assert not pool.forget_all()
    assert pool.find(bytes([pages[0]])) is not None
    pool.commit(1)
    assert pool.forget_all()
    assert (pool.find(bytes([pages[0]])), pool.num_cached, pool.num_available) == (None, 0, 3)
    pool.check()


def test_freeing_twice_is_our_bug():
    pool = PagePool(num_pages=3, page_size=4)
    pages = take(pool, 1)
    pool.free(pages, fence=0)
    with pytest.raises(AssertionError, match="freed more often"):
        pool.free(pages, fence=0)


def test_steps_commit_in_order():
    pool = PagePool(num_pages=3, page_size=4)
    pool.commit(2)
    with pytest.raises(AssertionError, match="step 1 was committed after step 2"):
        pool.commit(1)


def test_check_notices_a_lost_page():
    pool = PagePool(num_pages=3, page_size=4)
    pool._blank[0].pop()
    with pytest.raises(AssertionError, match="lost"):
        pool.check()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((8, 12, 1), "page_size must be a power of two, got 12"),
        ((9, 16, 2), "num_pages must be a multiple of num_ranks, got 9 pages for 2 ranks"),
        ((2, 16, 2), "num_pages 2 < 4"),
    ],
)
def test_impossible_sizes_are_named(sizes, message):
    with pytest.raises(ValueError, match=message):
        PagePool(*sizes)
