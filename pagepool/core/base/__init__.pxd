from pagepool.core.base.platform cimport *
from pagepool.core.base.memory cimport *
from pagepool.core.base.vectors cimport *
from pagepool.core.base.limits cimport *
from pagepool.core.base.siphash cimport *
from pagepool.core.base.sha256 cimport *
from pagepool.core.base.locks cimport *
