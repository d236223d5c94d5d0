"""Locks across a fork: a thread that forks takes the locks of all objects first.

A forked child has only the thread that forked. A lock held by another thread would stay locked in the child, with its records
half changed. So the forking thread takes all locks in order, and releases them in parent and child. A thread that holds a lock
runs no Python code and waits only for other such locks, so it always releases it. Always:

* An enlisted lock is in the ring of its kind, and its neighbours point back at it.
* Only the forking thread sets `is_held`, and `num_forks` counts the threads that fork or wait to fork.
"""

cimport cython

from pagepool.core.base.platform cimport *

import os

from pagepool.process_forks import hold_locks, release_locks, replace_lost_locks

cdef extern from *:
    """
    /* Before CPython 3.13 a Cython mutex is an allocated lock; NULL if the allocation failed. */
    #if PY_VERSION_HEX > 0x030d0000
    #define pagepool_has_lock(mutex) 1
    #else
    #define pagepool_has_lock(mutex) (*(void **)(mutex) != NULL)
    #endif
    """
    bint has_lock "pagepool_has_lock" (const void *mutex)


cdef extern from *:
    """
    /* Lock and unlock by address. A waiting thread lets other Python threads run. */
    #if PY_VERSION_HEX > 0x030d0000
    #define pagepool_lock(mutex) PyMutex_Lock((PyMutex *)(mutex))
    #define pagepool_unlock(mutex) PyMutex_Unlock((PyMutex *)(mutex))
    #else
    #include "pythread.h"
    static void pagepool_lock(void *mutex) {
        PyThread_type_lock lock = *(PyThread_type_lock *)mutex;
        if (PyThread_acquire_lock(lock, NOWAIT_LOCK)) return;
        Py_BEGIN_ALLOW_THREADS
        PyThread_acquire_lock(lock, WAIT_LOCK);
        Py_END_ALLOW_THREADS
    }
    #define pagepool_unlock(mutex) PyThread_release_lock(*(PyThread_type_lock *)(mutex))
    #endif
    static __thread int pagepool_is_forking;
    """
    void lock_at "pagepool_lock" (void *mutex)
    void unlock_at "pagepool_unlock" (void *mutex)
    bint is_forking "pagepool_is_forking"       # this thread holds all locks


cdef enum:
    NUM_LOCK_KINDS = 5        # members of LockKind


cdef LockNode[NUM_LOCK_KINDS] lock_rings
cdef cython.pymutex ring_lock     # taken before all other locks
cdef int num_forks = 0            # threads that hold `ring_lock` to fork, or wait for it


cdef int start_lock_rings() except -1:
    cdef int kind
    if not has_lock(&ring_lock):
        raise MemoryError("a lock")
    for kind in range(NUM_LOCK_KINDS):
        lock_rings[kind] = LockNode(prev=&lock_rings[kind], next=&lock_rings[kind], mutex=NULL, is_held=False)
    return 0


start_lock_rings()


cdef inline bint lock_the_rings() noexcept:
    """Lock the rings before a change; return whether that was needed. With the GIL it is needed only while another thread
    forks: the forking thread holds all locks, and its hooks may make objects and collect garbage.
    """
    if is_forking or not (GIL_DISABLED or num_forks):
        return False
    ring_lock.acquire()
    return True


cdef int enlist_lock(LockNode *node, void *mutex, LockKind kind) except -1:
    """Let forks take the lock of a new object. Raise MemoryError if the lock was not allocated, since using it would crash."""
    cdef LockNode *ring = &lock_rings[<int>kind]
    cdef LockNode *last
    cdef bint is_locked
    assert node.next == NULL and node.prev == NULL and not node.is_held
    if not has_lock(mutex):
        raise MemoryError("a lock")
    is_locked = lock_the_rings()
    last = ring.prev
    while kind == TABLE_LOCK and last != ring and last > node:  # the order of `in_lock_order`
        last = last.prev
    node[0] = LockNode(prev=last, next=last.next, mutex=mutex, is_held=False)
    last.next.prev = node
    last.next = node
    assert node.prev.next == node and node.next.prev == node
    if is_locked:
        ring_lock.release()
    return 0


cdef void delist_lock(LockNode *node) noexcept:
    """Remove the lock of a deallocated object, if it was enlisted."""
    cdef bint is_locked = lock_the_rings()
    if node.next != NULL:
        assert node.prev.next == node and node.next.prev == node
        node.prev.next = node.next
        node.next.prev = node.prev
    if is_locked:
        ring_lock.release()


cdef void lock_all(bint is_held) noexcept:
    """Take all locks, or release the held ones."""
    cdef LockNode *node
    cdef int kind
    for kind in range(NUM_LOCK_KINDS):
        node = lock_rings[kind].next
        while node != &lock_rings[kind]:
            if is_held:
                assert not node.is_held
                lock_at(node.mutex)
            elif node.is_held:
                unlock_at(node.mutex)
            node.is_held = is_held
            node = node.next


cdef void hold_core_locks() noexcept:
    """Wait until no other thread is inside an object, and keep threads out."""
    global is_forking, num_forks
    if is_forking:  # a hook forks again
        return
    num_forks += 1
    ring_lock.acquire()
    lock_all(True)
    is_forking = True


cdef void release_core_locks() noexcept:
    global is_forking, num_forks
    if not is_forking:
        return
    assert num_forks > 0
    lock_all(False)
    is_forking = False
    num_forks -= 1
    ring_lock.release()


def _before_fork() -> None:
    """Take the locks of Python objects, then those of the core: calls into the core are made under the former."""
    try:
        hold_locks()
    finally:
        hold_core_locks()


def _after_fork_in_parent() -> None:
    release_core_locks()
    release_locks()


def _after_fork_in_child() -> None:
    global num_forks
    release_core_locks()
    num_forks = 0  # other threads that waited to fork are gone
    release_locks()
    replace_lost_locks()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
