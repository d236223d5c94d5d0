# Locks across a fork: a thread that forks takes the locks of all objects first.

cdef enum LockKind:           # in the order in which they are taken
    BATCH_LOCK
    CHAIN_LOCK
    STORE_LOCK
    TABLE_LOCK
    INDEX_LOCK


cdef struct LockNode:         # of an object with a lock
    LockNode *prev            # others of the kind, in a ring; NULL outside
    LockNode *next
    void *mutex
    bint is_held              # by the thread that forks


cdef int enlist_lock(LockNode *node, void *mutex, LockKind kind) except -1
cdef void delist_lock(LockNode *node) noexcept
