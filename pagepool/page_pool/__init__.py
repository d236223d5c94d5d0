"""The pool of pages, its free queue and its page objects, as engines know them."""

from pagepool._core import CachePage
from pagepool.page_pool.pages import FreeCachePageQueue, Pages
from pagepool.page_pool.pool import PagePool, PageProbe
from pagepool.page_pool.prefix_index import CachedPages

__all__ = ["CachePage", "CachedPages", "FreeCachePageQueue", "PagePool", "PageProbe", "Pages"]
