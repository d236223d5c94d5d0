from pagepool.core.rows.batch cimport *
from pagepool.core.rows.running cimport *
from pagepool.core.rows.spans cimport *
