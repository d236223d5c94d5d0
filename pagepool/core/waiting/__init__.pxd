from pagepool.core.waiting.waiting cimport *
