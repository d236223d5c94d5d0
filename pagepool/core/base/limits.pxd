# The largest values that a caller may give, and the terms of pages, which both callers and the pool name.

cdef enum:
    MAX_PAGES = 1 << 30
    MAX_TOKENS = 1 << 30      # of a request
    MAX_GROUP = (1 << 28) - 1  # the flags of Page.group are the bits above
    UNKNOWN = 0               # no expected return time
    LAST_TERM = 18            # term n: in less than 2**n seconds; this one and longer times
    NEVER = 19                # not expected back
