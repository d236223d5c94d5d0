# Locks and processes. A forked child has only the thread that forked, so a lock may never come free there. Each object with a
# lock has the number of the process that made it, and a call in another process raises before it waits.

from pagepool.core.base.platform cimport *

cdef int process_number       # forks between the first process and this one


cdef int require_allocated(const void *mutex) except -1
cdef int refuse_process(str name) except -1


cdef inline int require_process(int number, str name) except -1:
    """Raise IntegrityError unless this process has the number. `name` is the class of the object, for the error."""
    if rare(number != process_number):
        refuse_process(name)
    return 0
