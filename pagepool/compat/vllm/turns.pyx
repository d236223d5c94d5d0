"""Ends of turns: the hints of vLLM's requests on the blocks that they give back.

The functions replace methods of vLLM's `KVCacheManager`, and one of its `Scheduler`. They inform a queue that listens, and
then call vLLM's own methods.
"""

from pagepool.compat.vllm.session_queue cimport Outcome, SessionQueue

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

cdef object vllm_free = KVCacheManager.free
cdef object vllm_pop_blocks_for_free = KVCacheManager.pop_blocks_for_free
cdef object vllm_add_request = Scheduler.add_request
cdef object WAITING_FOR_INPUT = RequestStatus.WAITING_FOR_STREAMING_REQ
cdef object ABORTED = RequestStatus.FINISHED_ABORTED
cdef object is_finished = RequestStatus.is_finished


def free(self, request):
    """Give back the blocks of a request. Blocks that nothing else holds are expected back at the hinted time."""
    end_turn(self, request)
    vllm_free(self, request)


def pop_blocks_for_free(self, request):
    """Return the blocks of a request, which are given back later, as in `free`."""
    end_turn(self, request)
    return vllm_pop_blocks_for_free(self, request)


def add_request(self, request):
    """Add a request, or the next input of a streaming one. vLLM ends a streaming request without further input as if it were
    aborted, so this function informs the queue first.
    """
    waiting = self.requests.get(request.request_id)
    if waiting is not None and waiting.status == WAITING_FOR_INPUT and not request.resumable:
        queue = self.kv_cache_manager.block_pool.free_block_queue
        if isinstance(queue, SessionQueue):
            (<SessionQueue>queue).end_input(request.request_id)
    return vllm_add_request(self, request)


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
