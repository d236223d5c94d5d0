from pagepool.core.tier.transfers cimport *
from pagepool.core.tier.tier cimport *
from pagepool.core.tier.moves cimport *
