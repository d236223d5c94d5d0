from pagepool.core.values.arguments cimport *
from pagepool.core.values.ids cimport *
from pagepool.core.values.chain cimport *
from pagepool.core.values.hashed cimport *
