"""Pages, the free queue, the prefix index, and which page is evicted next."""
