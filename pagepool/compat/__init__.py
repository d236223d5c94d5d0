"""Adapters: pagepool in engines that have an allocator of their own. Imported only where one is asked for."""
