# The ranking of a request's new pages: a policy remembers some keys of evicted pages. It puts a page whose key it knows, and
# the pages before that page, into the part for pages used again (in time or late) to which the key leads.
#
# Always: `num_ranked` is at most the number of the request's pages, and `num_unseen` is at most `MAX_UNSEEN`.

from libc.stdint cimport int32_t, uint32_t, uint64_t

from pagepool.core.pool.records cimport *

cdef enum:
    MAX_UNSEEN = 4            # unknown sampled keys in a row that end a ranking

cdef struct Ranking:          # how a policy ranked the pages that a request computes
    int32_t num_ranked        # leading pages, up to the last whose key the policy knew
    int32_t num_unseen        # sampled keys after these pages, all unknown to the policy


cdef inline void rank(
    Pool *pool, Ranking *ranking, const int32_t *ids, int32_t place, Digest key, int32_t group
) noexcept nogil:
    """Rank a missed page by its key, if the policy samples and knows the key, and the unranked pages before it. After
    `MAX_UNSEEN` unknown keys in a row, the rest of the request counts as new.
    """
    cdef uint64_t word
    cdef uint32_t part
    cdef int32_t i
    assert 0 <= ranking.num_unseen <= MAX_UNSEEN and ranking.num_ranked <= place
    if ranking.num_unseen == MAX_UNSEEN:
        return
    word = hash_key(key, group)
    if not is_sampled(word):
        return
    part = recall(pool.policy, word)
    if part == BLANK:
        ranking.num_unseen += 1
        return
    for i in range(ranking.num_ranked, place + 1):
        if ids[i] != NULL_PAGE and not is_free(pool, ids[i]):
            pool.policy.marks[ids[i]] = part
    ranking[0] = Ranking(num_ranked=place + 1, num_unseen=0)
