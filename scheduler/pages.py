"""The page pool: who holds which page of the KV cache, and which pages are free.

How this works. Every page is in exactly one state:

- **held**: its reference count is above 0. Sequences hold the pages of their tables; a page in several tables is
  shared, and then it is full and never written again.
- **cached**: nobody holds it, but its content is published under a key; a lookup revives it until it is reallocated.
- **blank**: nobody holds it and nobody can find it.

A new page is a blank one if there is any, else the least recently used cached one. The device may still be running
steps that name a page when its owner ends. So `free` takes a fence, the last dispatched step that names the pages, and
they stay held until that step has committed.
"""

from collections import OrderedDict


class PagePool:
    """Pages `[0, num_pages)`, split evenly over `num_ranks` ranks; rank r's first page is its null page.

    The pool owns reference counts, free lists, published keys and fences. It knows no requests and no tokens: keys are
    opaque bytes (see prefix_cache.py), and the caller passes how many pages its sequence holds on each rank.

    Raises:
        ValueError: sizes that make no pool; the message names them.
    """

    def __init__(self, num_pages: int, page_size: int, num_ranks: int = 1):
        if page_size < 1 or page_size & (page_size - 1):
            raise ValueError(f"page_size must be a power of two, got {page_size}")
        if num_ranks < 1 or num_pages % num_ranks:
            raise ValueError(f"num_pages must be a multiple of num_ranks, got {num_pages} pages for {num_ranks} ranks")
        if num_pages < 2 * num_ranks:
            raise ValueError(f"each rank needs its null page and one more: num_pages {num_pages} < {2 * num_ranks}")
        self.num_pages, self.page_size, self.num_ranks = num_pages, page_size, num_ranks
        self.pages_per_rank = num_pages // num_ranks
        self.num_usable = num_pages - num_ranks
        self.num_available = self.num_usable  # blank + cached
        self.committed_step = 0
        self._refs = [0] * num_pages
        self._key_of: list[bytes | None] = [None] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._blank = [self._pages_of_rank(rank) for rank in range(num_ranks)]
        self._cached = [OrderedDict[int, None]() for _ in range(num_ranks)]  # least recently used first
        self._fenced: dict[int, list[int]] = {}  # step -> pages that its commit gives back

    def _pages_of_rank(self, rank: int) -> list[int]:
        first = rank * self.pages_per_rank
        return list(range(first + self.pages_per_rank - 1, first, -1))  # a stack: low ids come first

    # Taking pages

    def allocate(self, num_pages: int, pages_by_rank: list[int]) -> list[int] | None:
        """`num_pages` pages with reference count 1, or None (and no change) if there are not as many.

        Each comes from the rank with free pages that holds fewest of this sequence's pages, ties to the rank with most
        free. `pages_by_rank` is the sequence's count for each rank; it is updated in place.
        """
        if num_pages > self.num_available:
            return None
        self.num_available -= num_pages
        return [self._take(self._choose_rank(pages_by_rank), pages_by_rank) for _ in range(num_pages)]

    def _choose_rank(self, pages_by_rank: list[int]) -> int:
        if self.num_ranks == 1:
            return 0
        num_free = [len(blank) + len(cached) for blank, cached in zip(self._blank, self._cached, strict=True)]
        ranks = [rank for rank in range(self.num_ranks) if num_free[rank]]
        return min(ranks, key=lambda rank: (pages_by_rank[rank], -num_free[rank]))

    def _take(self, rank: int, pages_by_rank: list[int]) -> int:
        if self._blank[rank]:
            page = self._blank[rank].pop()
        else:
            page, _ = self._cached[rank].popitem(last=False)
            self._forget(page)
        self._refs[page] = 1
        pages_by_rank[rank] += 1
        return page

    def acquire(self, pages: list[int], pages_by_rank: list[int]) -> None:
        """One more reference to each of these published pages."""
        for page in pages:
            rank = page // self.pages_per_rank
            if not self._refs[page]:
                del self._cached[rank][page]
                self.num_available -= 1
            self._refs[page] += 1
            pages_by_rank[rank] += 1

    # Giving pages back

    def free(self, pages: list[int], fence: int) -> None:
        """One reference less to each page, as soon as step `fence` has committed.

        The last page goes first, so that a prefix outlives its continuations.
        """
        if fence > self.committed_step:
            self._fenced.setdefault(fence, []).extend(reversed(pages))
        else:
            self._release(reversed(pages))

    def commit(self, step: int) -> None:
        """Step `step` and all before it have committed: the pages that they fenced come back."""
        assert step > self.committed_step, f"step {step} was committed after step {self.committed_step}"
        self.committed_step = step
        if self._fenced:
            for fence in [fence for fence in self._fenced if fence <= step]:
                self._release(self._fenced.pop(fence))

    def _release(self, pages) -> None:
        for page in pages:
            self._refs[page] -= 1
            assert self._refs[page] >= 0, f"page {page} was freed more often than it was taken"
            if self._refs[page]:
                continue
            self.num_available += 1
            rank = page // self.pages_per_rank
            if self._key_of[page] is None:
                self._blank[rank].append(page)
            else:
                self._cached[rank][page] = None

    # Published content

    def publish(self, page: int, key: bytes) -> None:
        """Makes a held page findable. The first page under a key wins; another one with this content stays private."""
        if key not in self._page_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def find(self, key: bytes) -> int | None:
        """The page published under `key`, held or cached."""
        return self._page_of.get(key)

    def forget_all(self) -> bool:
        """Drops every key. False (and no change) while any page is held."""
        if self.num_available != self.num_usable:
            return False
        for rank, cached in enumerate(self._cached):
            for page in cached:
                self._forget(page)
            self._blank[rank].extend(cached)
            cached.clear()
        return True

    def _forget(self, page: int) -> None:
        key = self._key_of[page]
        assert key is not None
        del self._page_of[key]
        self._key_of[page] = None

    # Counts

    @property
    def num_cached(self) -> int:
        return sum(map(len, self._cached))

    @property
    def num_held(self) -> int:
        return self.num_usable - self.num_available

    def num_idle(self, pages: list[int]) -> int:
        """How many of these published pages nobody holds: acquiring them makes that many fewer available."""
        return sum(not self._refs[page] for page in pages)

    def num_returning(self) -> int:
        """Pages that become available when the steps in flight commit, whatever else happens."""
        return sum(self._refs[page] == 1 for pages in self._fenced.values() for page in pages)

    def refs(self, page: int) -> int:
        return self._refs[page]

    def fenced_pages(self) -> list[int]:
        """Every reference that waits behind a fence (a page may occur more than once)."""
        return [page for pages in self._fenced.values() for page in pages]

    def check(self) -> None:
        """Asserts blank + cached + held == usable, each page in one state, and that keys and pages agree. O(pages)."""
        blank = [page for pages in self._blank for page in pages]
        cached = [page for pages in self._cached for page in pages]
        held = [page for page in range(self.num_pages) if self._refs[page]]
        nulls = range(0, self.num_pages, self.pages_per_rank)
        assert sorted([*blank, *cached, *held, *nulls]) == list(range(self.num_pages)), (
            "a page is lost or in two states"
        )
        assert self.num_available == len(blank) + len(cached)
        assert all(self._key_of[page] is None for page in [*blank, *nulls])
        assert all(self._key_of[page] is not None for page in cached)
        keys = {key: page for page, key in enumerate(self._key_of) if key is not None}
        assert keys == self._page_of, "keys and pages disagree"
        for rank, (blanks, caches) in enumerate(zip(self._blank, self._cached, strict=True)):
            assert all(page // self.pages_per_rank == rank for page in [*blanks, *caches])
