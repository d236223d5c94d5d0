"""Adapters: pagepool in engines that have an allocator of their own. Each is a module, imported by nobody but its users."""
