"""Adapters: pagepool in engines that have an allocator of their own. Nobody imports them but their users, and who sets a variable."""
