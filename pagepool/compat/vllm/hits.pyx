"""The longest cached prefix of a request, compiled: of full attention from the first block on, of a window from the last back.

The functions replace class methods of vLLM's managers for both kinds, with the same results. Hits that end inside a block, lazy
lists of hashes, and foreign pools are left to vLLM's own methods.
"""

cimport cython

from pagepool.compat.vllm.blocks cimport Block, BlockMap, find_first_block
from pagepool.compat.vllm.pool cimport block_key_of, suffix_of

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager

cdef object vllm_find_full_hit = FullAttentionManager.find_longest_cache_hit.__func__
cdef object vllm_find_window_hit = SlidingWindowManager.find_longest_cache_hit.__func__


@cython.final
cdef class Lookup:
    """Hashes of a request, with the map and groups to search."""

    cdef dict cache
    cdef list hashes
    cdef list suffixes          # one per group
    cdef Block null_block
    cdef Py_ssize_t block_size  # tokens
    cdef Py_ssize_t stride      # hashes per block
    cdef Py_ssize_t alignment   # tokens
    cdef Py_ssize_t max_num_blocks

    cdef list find_blocks(self, Py_ssize_t i):
        """Return block `i` in each group, or None if a group has none."""
        cdef list found = []
        cdef Block block
        for suffix in self.suffixes:
            block = find_first_block(self.cache, block_key_of(self.hashes[(i + 1) * self.stride - 1], suffix))
            if block is None:
                return None
            found.append(block)
        return found


cdef Lookup lookup_of(object hashes, object max_length, dict options):
    """Make a look-up, or return None to leave it to vLLM's own method."""
    cdef Lookup lookup = Lookup.__new__(Lookup)
    cdef Py_ssize_t hash_block_size
    pool = options["block_pool"]
    if type(hashes) is not list or type(pool) is not BlockPool or type(pool.cached_block_hash_to_block) is not BlockMap:
        return None
    lookup.cache = (<BlockMap>pool.cached_block_hash_to_block)._cache
    lookup.hashes = hashes
    lookup.suffixes = [suffix_of(group_id) for group_id in options["kv_cache_group_ids"]]
    lookup.null_block = pool.null_block
    lookup.block_size = options["kv_cache_spec"].block_size * options.get("dcp_world_size", 1)
    lookup.alignment = options["alignment_tokens"]
    hash_block_size = pool.hash_block_size
    if lookup.block_size <= 0 or hash_block_size <= 0 or lookup.block_size % hash_block_size or not lookup.suffixes:
        return None
    if lookup.alignment < lookup.block_size:  # hits may end inside a block
        return None
    lookup.stride = lookup.block_size // hash_block_size
    lookup.max_num_blocks = max_length // lookup.block_size
    return lookup if lookup.max_num_blocks >= 0 else None


def find_full_hit(cls, block_hashes, max_length, **options):
    """Return the cached blocks by group, and their number of tokens. The options are those of vLLM's method. O(blocks)."""
    cdef Lookup lookup = lookup_of(block_hashes, max_length, options)
    cdef tuple hits
    cdef list found
    cdef Py_ssize_t i, num_tokens, num_groups
    if lookup is None:
        return vllm_find_full_hit(cls, block_hashes, max_length, **options)
    num_groups = len(lookup.suffixes)
    hits = tuple([[] for _ in range(num_groups)])
    for i in range(min(lookup.max_num_blocks, <Py_ssize_t>len(lookup.hashes) // lookup.stride)):
        found = lookup.find_blocks(i)
        if found is None:
            break
        for g in range(num_groups):
            (<list>hits[g]).append(found[g])
    num_tokens = <Py_ssize_t>len(<list>hits[0]) * lookup.block_size
    if options["drop_eagle_block"] and num_tokens:
        num_tokens -= lookup.block_size
    num_tokens -= num_tokens % lookup.alignment
    cut_hits(hits, (num_tokens + lookup.block_size - 1) // lookup.block_size)
    return hits, num_tokens


cdef int cut_hits(tuple hits, Py_ssize_t num_blocks) except -1:
    for blocks in hits:
        del (<list>blocks)[num_blocks:]
    return 0


def find_window_hit(cls, block_hashes, max_length, **options):
    """Return the blocks by group, with null blocks before the window, and their number of tokens. The keyword options are those
    of vLLM's method. O(blocks).
    """
    cdef Lookup lookup = lookup_of(block_hashes, max_length, options)
    cdef bint is_eagle = options["drop_eagle_block"]
    cdef tuple hits
    cdef Py_ssize_t num_blocks, num_wanted
    is_known = lookup is not None and options.get("dcp_world_size", 1) == options.get("pcp_world_size", 1) == 1
    if not is_known or lookup.max_num_blocks * lookup.stride > <Py_ssize_t>len(lookup.hashes):
        return vllm_find_window_hit(cls, block_hashes, max_length, **options)
    num_wanted = cls._contiguous_blocks_for_hit(options["kv_cache_spec"].sliding_window, lookup.block_size, is_eagle)
    hits = tuple([[lookup.null_block] * lookup.max_num_blocks for _ in lookup.suffixes])
    num_blocks = find_window(lookup, hits, num_wanted, is_eagle)
    if is_eagle and num_blocks:
        num_blocks = aligned(lookup, num_blocks - 1)
    cut_hits(hits, num_blocks)
    return hits, num_blocks * lookup.block_size


cdef Py_ssize_t aligned(Lookup lookup, Py_ssize_t num_blocks) noexcept:
    """Round `num_blocks` down to a number of tokens at which a hit may end."""
    while num_blocks * lookup.block_size % lookup.alignment:
        num_blocks -= 1
    return num_blocks


cdef Py_ssize_t find_window(Lookup lookup, tuple hits, Py_ssize_t num_wanted, bint is_eagle) except -1:
    """Find the last run of `num_wanted` cached blocks that ends where a hit may end, otherwise the run from the first block on.
    Fill `hits`, and return the number of blocks up to the end of the run; for eagle, the last one is dropped later.
    """
    cdef list found
    cdef Py_ssize_t i, num_run = 0
    for i in range(lookup.max_num_blocks - 1, -1, -1):
        found = lookup.find_blocks(i)
        if found is None:
            num_run = 0
            continue
        if num_run == 0 and (i + (not is_eagle)) * lookup.block_size % lookup.alignment:
            continue
        for g in range(len(hits)):
            (<list>hits[g])[i] = found[g]
        num_run += 1
        if num_run >= num_wanted:
            return i + num_run
    return aligned(lookup, num_run)
