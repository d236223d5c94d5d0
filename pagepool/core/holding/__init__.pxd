from pagepool.core.holding.rules cimport *
from pagepool.core.holding.boundaries cimport *
from pagepool.core.holding.holding cimport *
from pagepool.core.holding.writes cimport *
from pagepool.core.holding.groups cimport *
from pagepool.core.holding.lookups cimport *
from pagepool.core.holding.request_pages cimport *
