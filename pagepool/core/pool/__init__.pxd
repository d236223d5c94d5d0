from pagepool.core.pool.policy cimport *
from pagepool.core.pool.records cimport *
from pagepool.core.pool.owners cimport *
from pagepool.core.pool.queue cimport *
from pagepool.core.pool.index cimport *
from pagepool.core.pool.pool cimport *
from pagepool.core.pool.leases cimport *
from pagepool.core.pool.store cimport *
