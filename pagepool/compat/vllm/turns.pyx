"""Ends of turns: what vLLM's requests said of the blocks that they give back.

The functions replace methods of vLLM's `KVCacheManager`. They tell a queue that listens, and then call vLLM's own methods.
"""

from pagepool.compat.vllm.session_queue cimport Outcome, SessionQueue

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import RequestStatus

cdef object vllm_free = KVCacheManager.free
cdef object vllm_pop_blocks_for_free = KVCacheManager.pop_blocks_for_free
cdef object ABORTED = RequestStatus.FINISHED_ABORTED
cdef object is_finished = RequestStatus.is_finished


def free(self, request):
    """Give back the blocks of a request. Those whose only reference it has are expected back when it said."""
    end_turn(self, request)
    vllm_free(self, request)


def pop_blocks_for_free(self, request):
    """Return the blocks of a request, which are given back later, as in `free`."""
    end_turn(self, request)
    return vllm_pop_blocks_for_free(self, request)


cdef int end_turn(object self, object request) except -1:
    cdef Outcome outcome = Outcome.PREEMPTED
    cdef list groups
    queue = self.block_pool.free_block_queue
    if not isinstance(queue, SessionQueue):
        return 0
    status, request_id = request.status, request.request_id
    if status == ABORTED:
        outcome = Outcome.ABORTED
    elif is_finished(status):
        outcome = Outcome.FINISHED
    groups = [manager.req_to_blocks.get(request_id, ()) for manager in self.coordinator.single_type_managers]
    return (<SessionQueue>queue).end_turn(request_id, groups, outcome)
