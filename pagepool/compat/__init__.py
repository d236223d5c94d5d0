"""Adapters that replace the allocator of an engine by pagepool. Each is imported only on demand."""
