# Locks across a fork: a thread that forks takes the locks of all objects first.

cdef enum LockKind:           # in locking order
    BATCH_LOCK
    CHAIN_LOCK
    STORE_LOCK
    TABLE_LOCK
    INDEX_LOCK


cdef struct LockNode:         # the lock of an object
    LockNode *prev            # ring of the locks of a kind; NULL: not enlisted
    LockNode *next
    void *mutex
    bint is_held              # held by the forking thread


cdef int enlist_lock(LockNode *node, void *mutex, LockKind kind) except -1
cdef void delist_lock(LockNode *node) noexcept
