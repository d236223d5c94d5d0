"""The pool of pages, its free queue and its page objects, as engines know them."""

from pagepool._core import CachePage
from pagepool.page_pool.pages import FreeCachePageQueue, Pages, PrefixIndex
from pagepool.page_pool.pool import PagePool, PageProbe

__all__ = ["CachePage", "FreeCachePageQueue", "PagePool", "PageProbe", "Pages", "PrefixIndex"]
