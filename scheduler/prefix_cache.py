"""Prefix cache: full pages of tokens under chained keys.

The key of a page is sha256 over its parent's key and its own tokens; the first page's parent is made from the adapter
and the cache salt. So equal keys mean equal tokens from the start on, under the same adapter and salt, and nothing of
the mesh or of the batch enters. Fields are typed and length-prefixed, and the two kinds of key are domain-separated:
no choice of salt or tokens can imitate another.

Keys of prompt pages are made when a request arrives, keys of output pages when they are published, each once in the
life of a request: `Scheduler.schedule` never hashes.

Where the keys and values of a token depend on whether it was in a prompt or in an answer, as under sparse attention,
`share_answers` is False: then only the full pages of a prompt have keys, to publish them by and to find others'.
"""

import hashlib
import struct
import sys

from jaxserve.scheduler.pages import PagePool
from jaxserve.scheduler.request import Request


class PrefixCache:
    """Makes keys and looks them up; the pages themselves, their keys and their LRU order belong to the pool."""

    def __init__(self, pool: PagePool, *, enabled: bool = True, share_answers: bool = True):
        self.enabled, self._share_answers = enabled, share_answers
        self._pool = pool
        self._page_size = pool.page_size

    def enter(self, request: Request) -> None:
        """Makes the keys of the prompt's full pages; once, at arrival."""
        if self.enabled:
            self._extend_keys(request, request.num_prompt_tokens // self._page_size)

    def match(self, request: Request) -> list[int]:
        """The longest run of published pages that begins `request`, short of its last known token. Changes nothing.

        The last token is always left to compute, for its logits.
        """
        pages: list[int] = []
        if not self.enabled or request.skip_reading_prefix_cache:
            return pages
        for key in request.page_keys[: (request.num_tokens - 1) // self._page_size]:
            page = self._pool.find(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def start(self, request: Request, num_pages: int) -> None:
        """`request` begins (again) with `num_pages` published pages in its table."""
        request.num_published_pages = num_pages
        next_end = (num_pages + 1) * self._page_size
        publishes = self.enabled and self._num_shared(request, next_end) > num_pages
        request.publish_at = next_end if publishes else sys.maxsize

    def publish(self, request: Request, num_written: int) -> None:
        """Publishes the full pages among the first `num_written` tokens.

        The caller answers for it that these tokens are committed and that their KV is written, through the last layer,
        by committed steps.
        """
        num_full = self._num_shared(request, num_written)
        self._extend_keys(request, num_full)
        for index in range(request.num_published_pages, num_full):
            self._pool.publish(request.page_ids[index], request.page_keys[index])
        self.start(request, num_full)

    def can_share(self, request: Request) -> bool:
        """Whether waiting for another request's prompt pages can save `request` any work."""
        return self.enabled and not request.skip_reading_prefix_cache and request.num_prompt_tokens > self._page_size

    def has_published_prompt(self, request: Request) -> bool:
        return request.num_published_pages >= request.num_prompt_tokens // self._page_size

    def _num_shared(self, request: Request, num_tokens: int) -> int:
        """How many of the pages that the first `num_tokens` fill may be shared."""
        return (num_tokens if self._share_answers else min(num_tokens, request.num_prompt_tokens)) // self._page_size

    def _extend_keys(self, request: Request, num_pages: int) -> None:
        keys = request.page_keys
        parent = keys[-1] if keys else root_key(request.adapter, request.cache_salt)
        for index in range(len(keys), num_pages):
            start = index * self._page_size
            parent = page_key(parent, request.token_slice(start, start + self._page_size))
            keys.append(parent)


def root_key(adapter: str | None, cache_salt: str | None) -> bytes:
    """The parent of every first page under this adapter and salt."""
    return hashlib.sha256(b"jaxserve root\0" + _field(adapter) + _field(cache_salt)).digest()


def page_key(parent: bytes, token_ids: list[int]) -> bytes:
    return hashlib.sha256(b"jaxserve page\0" + parent + struct.pack(f"<{len(token_ids)}q", *token_ids)).digest()


def _field(text: str | None) -> bytes:
    if text is None:
        return b"\0"
    data = text.encode("utf-8", "surrogatepass")
    return b"\1" + len(data).to_bytes(8, "little") + data
