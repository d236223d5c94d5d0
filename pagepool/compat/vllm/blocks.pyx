"""Stand-ins for vLLM's blocks, free queue and map from hashes to blocks: the same attributes, methods and order, compiled.

They refuse calls that would corrupt the queue: queueing a block twice, or taking out one that is not queued. None of them needs
vLLM.
"""

cimport cython

from pagepool.compat.patching import Unpatched
from pagepool.errors import ArgumentError, ArgumentTypeError, DoubleFreeError, IntegrityError, OutOfPagesError


cdef class FreeQueue:
    """Base of the free queues that the pool's functions use: vLLM's methods in one place, and hooks for eviction policies.

    The hooks from `note_hash` to `note_request` inform a queue whose policy depends on cached and hit blocks. The last three
    hooks inform a queue that `listens` to requests.
    """

    def popleft(self) -> Block:
        """Take the first block."""
        if self.num_free_blocks == 0:
            raise OutOfPagesError("No free blocks available")  # vLLM's text
        return self.popleft_n(1)[0]

    def append(self, Block block not None) -> None:
        """Put a block back, as `append_n` does."""
        self.append_n([block])

    def get_all_free_blocks(self) -> list[Block]:
        """Return the blocks in the order of `iter_blocks_after`. O(blocks)."""
        return list(self.iter_blocks_after(None))

    cdef int check_number(self, Py_ssize_t n, str name) except -1:
        """Raise ArgumentError for a negative number of blocks, OutOfPagesError if fewer are free."""
        if n < 0:
            raise ArgumentError(f"{name}: got {n}, allowed: at least 0")
        if n > self.num_free_blocks:
            raise OutOfPagesError(f"blocks: got {n}, allowed: at most {self.num_free_blocks}, the number of free ones")
        return 0

    cdef list take_blocks(self, Py_ssize_t n):
        """Take `n` blocks; the caller checks that there are enough. Raise IntegrityError, with nothing taken, if one has
        references.
        """
        raise NotImplementedError

    cdef int touch(self, list blocks) except -1:
        """Add a reference to each block; blocks without one leave the queue."""
        raise NotImplementedError

    cdef int requeue(self, list first, list last) except -1:
        """Put the blocks in `first` before all others, and the blocks in `last` behind all others, both in order."""
        raise NotImplementedError

    cdef int require_in(self, Block block) except -1:
        """Raise IntegrityError unless a block is in the queue."""
        raise NotImplementedError

    cdef int require_out(self, Block block) except -1:
        """Raise DoubleFreeError if a block is in the queue."""
        raise NotImplementedError

    cdef int note_hash(self, Block block) except -1:
        """Note that a block got or lost its hash by a call of the block's own method."""
        return 0

    cdef int begin_span(self) except -1:
        """Prepare for hashes of several blocks of one request."""
        return 0

    cdef int end_span(self, list blocks, Py_ssize_t start, Py_ssize_t stop) except -1:
        """Note that a request's blocks from `start` to `stop` got their hashes, except for uncached ones."""
        return 0

    cpdef int note_request(self) except -1:
        """Note that a request begins to take blocks."""
        return 0

    cdef int begin_turn(self, object request) except -1:
        """Begin the calls for a request without blocks; `end_call` ends them."""
        return 0

    cdef int go_on(self, object request_id) except -1:
        """Begin the calls for a request with blocks; `end_call` ends them."""
        return 0

    cdef int end_call(self) except -1:
        """End the calls for a request."""
        return 0


cdef int tell_queue(Block block) except -1:
    queue = getattr(block.pool, "free_block_queue", None)
    if isinstance(queue, FreeQueue):
        (<FreeQueue>queue).note_hash(block)
    return 0


@cython.final
@cython.trashcan(True)  # a long chain of links is freed without recursion
cdef class Block:
    """A block's id, reference count and hash, and its neighbors in the free queue (None while it is not queued).

    `pool`: its pool. ``_block_hash``: the hash with the group's id, if the block is cached.
    """

    def __init__(
        self, block_id, ref_cnt=0, _block_hash=None, _block_hash_num_tokens=None, prev_free_block=None, next_free_block=None,
        is_null=False, *, pool=None,
    ):
        self.block_id = block_id
        self.ref_cnt = ref_cnt
        self.pool = pool
        self._block_hash = _block_hash
        self._block_hash_num_tokens = _block_hash_num_tokens
        self.prev_free_block = prev_free_block
        self.next_free_block = next_free_block
        self.is_null = is_null

    @property
    def block_hash(self) -> bytes | None:
        """The hash with the group's id, if the block is cached."""
        return self._block_hash

    @property
    def block_hash_num_tokens(self) -> int | None:
        """Number of tokens covered by the hash, from the start of the prompt."""
        return self._block_hash_num_tokens

    @property
    def _block_hash_num_tokens(self) -> int | None:
        return None if self.num_hash_tokens == NO_TOKENS else self.num_hash_tokens

    @_block_hash_num_tokens.setter
    def _block_hash_num_tokens(self, value) -> None:
        self.num_hash_tokens = NO_TOKENS if value is None else value

    def set_block_hash(self, block_hash, num_tokens=None) -> None:
        """Give the block a hash. Raise AssertionError, as vLLM does, if it has one."""
        if self._block_hash is not None or self.num_hash_tokens != NO_TOKENS:
            raise AssertionError(f"block {self.block_id} already has a hash")
        self._block_hash_num_tokens = num_tokens
        self._block_hash = block_hash
        tell_queue(self)

    def reset_hash(self) -> None:
        """Remove the hash."""
        self._block_hash = None
        self.num_hash_tokens = NO_TOKENS
        tell_queue(self)

    def __eq__(self, other):
        if self is other:
            return True
        if type(other) is not Block:
            return NotImplemented
        return fields_of(self) == fields_of(other)

    def __repr__(self):
        return (
            f"KVCacheBlock(block_id={self.block_id}, ref_cnt={self.ref_cnt}, _block_hash={self._block_hash!r}, "
            f"_block_hash_num_tokens={self._block_hash_num_tokens}, prev_free_block={block_id_of(self.prev_free_block)}, "
            f"next_free_block={block_id_of(self.next_free_block)})"
        )


cdef object block_id_of(Block block):
    return None if block is None else block.block_id


cdef tuple fields_of(Block block):
    """Return the values by which two blocks are compared."""
    links = block_id_of(block.prev_free_block), block_id_of(block.next_free_block)
    return block.block_id, block.ref_cnt, block._block_hash, block.num_hash_tokens, block.is_null, links


cdef Block as_block(object value):
    if type(value) is not Block:
        raise ArgumentTypeError(f"block: got {type(value).__name__}, allowed: one made while pagepool is installed")
    return <Block>value


cdef int check_queued(Block block) except -1:
    if block.prev_free_block is None or block.next_free_block is None:
        raise IntegrityError(f"block {block.block_id} is not in the free queue: {block!r}")
    return 0


cdef int check_unqueued(Block block) except -1:
    if block.prev_free_block is not None or block.next_free_block is not None:
        raise DoubleFreeError(f"block {block.block_id} is in the free queue already: {block!r}")
    return 0


cdef int check_unheld(list blocks) except -1:
    """Raise IntegrityError for a queued block with references."""
    cdef Block block
    for value in blocks:
        block = <Block>value
        if block.ref_cnt:
            raise IntegrityError(f"block {block.block_id} is in the free queue with {block.ref_cnt} references")
    return 0


cdef list first_blocks(BlockQueue queue, Py_ssize_t n):
    """Return the first `n` blocks. Raise IntegrityError if the links end sooner."""
    cdef list blocks = []
    cdef Block block = queue.fake_free_list_head
    while len(blocks) < n:
        block = block.next_free_block
        if block is None or block is queue.fake_free_list_tail:
            raise IntegrityError(f"the free queue has {len(blocks)} blocks and counts {queue.num_free_blocks}")
        blocks.append(block)
    return blocks


cdef int join(BlockQueue queue, Block before, list blocks) except -1:
    """Insert checked blocks behind `before`, the head or a block of the queue."""
    cdef Block block, following = before.next_free_block
    assert following is not None and following.prev_free_block is before
    for value in blocks:
        block = <Block>value
        block.prev_free_block = before
        before.next_free_block = block
        before = block
    before.next_free_block = following
    following.prev_free_block = before
    queue.num_free_blocks += len(blocks)
    return 0


cdef int leave(BlockQueue queue, Block block) except -1:
    """Take a checked block out."""
    assert queue.num_free_blocks > 0
    assert block.prev_free_block.next_free_block is block and block.next_free_block.prev_free_block is block
    block.prev_free_block.next_free_block = block.next_free_block
    block.next_free_block.prev_free_block = block.prev_free_block
    block.prev_free_block = block.next_free_block = None
    queue.num_free_blocks -= 1
    return 0


cdef int leave_front(BlockQueue queue, list blocks) except -1:
    """Take out the first blocks, given as `blocks`."""
    cdef Block block, following
    if not blocks:
        return 0
    following = (<Block>blocks[len(blocks) - 1]).next_free_block
    if following is None:
        raise IntegrityError(f"the free queue ends without its tail behind block {(<Block>blocks[len(blocks) - 1]).block_id}")
    for value in blocks:
        block = <Block>value
        block.prev_free_block = block.next_free_block = None
    queue.fake_free_list_head.next_free_block = following
    following.prev_free_block = queue.fake_free_list_head
    queue.num_free_blocks -= len(blocks)
    return 0


cdef list checked_blocks(object blocks):
    """Return the blocks as a list. Raise DoubleFreeError if one is in a queue already, or named twice."""
    cdef list checked = list(blocks)
    for value in checked:
        check_unqueued(as_block(value))
    if len({(<Block>value).block_id for value in checked}) < len(checked):
        raise DoubleFreeError(f"blocks to queue: one of them is named twice: {[(<Block>value).block_id for value in checked]}")
    return checked


cdef class BlockQueue(FreeQueue):
    """Free blocks in the order in which they are taken, between two sentinel blocks of id -1.

    O(1) a block. Errors name the block and change nothing: `DoubleFreeError` for a block queued already, `IntegrityError` for
    one that is not queued, `OutOfPagesError` if the queue is empty.
    """

    def __init__(self, blocks):
        cdef list checked = checked_blocks(blocks)
        self.fake_free_list_head = Block(-1)
        self.fake_free_list_tail = Block(-1)
        self.fake_free_list_head.next_free_block = self.fake_free_list_tail
        self.fake_free_list_tail.prev_free_block = self.fake_free_list_head
        join(self, self.fake_free_list_head, checked)

    def popleft_n(self, Py_ssize_t n) -> list[Block]:
        """Take the first `n` blocks."""
        cdef list blocks
        self.check_number(n, "n")
        blocks = first_blocks(self, n)
        leave_front(self, blocks)
        return blocks

    cdef list take_blocks(self, Py_ssize_t n):
        cdef list blocks = first_blocks(self, n)
        check_unheld(blocks)
        leave_front(self, blocks)
        return blocks

    def remove(self, Block block not None) -> None:
        """Take a block out, wherever it is."""
        check_queued(block)
        leave(self, block)

    cdef int touch(self, list blocks) except -1:
        cdef Block block
        for value in blocks:
            block = <Block>value
            if block.ref_cnt == 0:
                leave(self, block)
            block.ref_cnt += 1
        return 0

    cdef int requeue(self, list first, list last) except -1:
        join(self, self.fake_free_list_head, first)
        join(self, self.fake_free_list_tail.prev_free_block, last)
        return 0

    cdef int require_in(self, Block block) except -1:
        return check_queued(block)

    cdef int require_out(self, Block block) except -1:
        return check_unqueued(block)

    def append_n(self, blocks) -> None:
        """Put blocks behind the last one, in order. Raise AssertionError, as vLLM does, if the queue's tail is not linked."""
        if self.fake_free_list_tail.prev_free_block is None:
            raise AssertionError("the tail of the free queue is not linked")
        join(self, self.fake_free_list_tail.prev_free_block, checked_blocks(blocks))

    def prepend_n(self, blocks) -> None:
        """Put blocks before the first one, in order."""
        join(self, self.fake_free_list_head, checked_blocks(blocks))

    def iter_blocks_after(self, Block cursor):
        """Yield the blocks behind `cursor`; all blocks for None."""
        cdef Block block = (self.fake_free_list_head if cursor is None else cursor).next_free_block
        while block is not None and block is not self.fake_free_list_tail:
            yield block
            block = block.next_free_block


class Queue(BlockQueue, metaclass=Unpatched):
    """The stand-in for vLLM's class."""
    __slots__ = ()


cdef Block find_first_block(dict cache, bytes key):
    """Return the block cached first under a key, or None."""
    found = cache.get(key)
    if found is None or type(found) is Block:
        return found
    for value in (<dict?>found).values():
        return as_block(value)
    return None


cdef bint has_block(dict cache, bytes key, int32_t block_id) except -1:
    found = cache.get(key)
    if type(found) is Block:
        return (<Block>found).block_id == block_id
    return found is not None and block_id in <dict?>found


cdef int add_block(dict cache, bytes key, Block block) except -1:
    """Cache a block under a key, after the key's other blocks."""
    cdef Block first
    found = cache.get(key)
    if found is None:
        cache[key] = block
    elif type(found) is Block:
        first = <Block>found
        cache[key] = {first.block_id: first, block.block_id: block}
    else:
        (<dict?>found)[block.block_id] = block
    return 0


cdef object remove_block(dict cache, bytes key, int32_t block_id):
    """Remove and return a block of a key, or return None if it is not there. A key with blocks left moves to the end."""
    found = cache.pop(key, None)
    if found is None:
        return None
    if type(found) is Block:
        if (<Block>found).block_id == block_id:
            return found
        cache[key] = found
        return None
    block = (<dict?>found).pop(block_id, None)
    if found:
        cache[key] = found
    return block


@cython.final
cdef class BlockMap:
    """Cached blocks by hash: a key's only block, or a dict of its blocks by id, in the order of caching. O(1)."""

    def __init__(self):
        self._cache = {}

    def get_one_block(self, bytes key not None) -> Block | None:
        """Return the block cached first."""
        return find_first_block(self._cache, key)

    def contain(self, bytes key not None, block_id) -> bool:
        """Return whether the block is cached under this key."""
        return has_block(self._cache, key, block_id)

    def insert(self, bytes key not None, Block block not None) -> None:
        """Cache a block under a key, after the key's other blocks."""
        add_block(self._cache, key, block)

    def pop(self, bytes key not None, block_id) -> Block | None:
        """Remove a block and return it, or None if it is not cached under this key."""
        return remove_block(self._cache, key, block_id)

    def __len__(self) -> int:
        return len(self._cache)
