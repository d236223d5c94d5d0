from pagepool.core.tables.page_table cimport *
from pagepool.core.tables.table cimport *
