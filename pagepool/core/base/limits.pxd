# The largest values of arguments, and the terms of pages.

cdef enum:
    MAX_PAGES = 1 << 30
    MAX_TOKENS = 1 << 30      # per request
    MAX_LOOKAHEAD = 64        # tokens behind a page
    MAX_GROUP = (1 << 28) - 1  # the higher bits of `Page.group` are flags
    UNKNOWN = 0               # no expected return time
    LAST_TERM = 18            # term n: expected back in less than 2**n seconds; the last term includes longer times
    NEVER = 19                # not expected back
