"""Plants bugs in a copy of the package, one at a time, and checks that tests catch them: the tests that `TESTED_BUGS` names for
a bug, or else the simulation of contents. Where these find nothing, the differential with the oracle decides.

``make planted``. Bugs of the core are built together and switched on by PAGEPOOL_PLANTED; those of the façade are written into
the copy in turn. A bug changes a text that must be in the source exactly once, so that one which no longer fits is reported.
The package's own checks are not called: what is caught, the device and the calls themselves show.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SOURCES = ["pagepool", "setup.py", "pyproject.toml", "README.md", "LICENSE"]
PLATFORM = "pagepool/core/base/platform.pxd"
SWITCH = '''
cdef extern from *:
    """
    #include <stdlib.h>
    static int pagepool_planted_bug(void) {
        static int number = -1;
        const char *text = getenv("PAGEPOOL_PLANTED");
        if (number < 0) number = text ? atoi(text) : 0;
        return number;
    }
    """
    int planted_bug "pagepool_planted_bug" () noexcept nogil
'''
IMPORT = "from pagepool.core.base.platform cimport planted_bug\n"
FIRST_IMPORT = re.compile(r"^(?=from [\w.]+ c?import |cimport )", re.MULTILINE)
TIMEOUT_SECONDS = 60  # on top of the simulation's own time
MARKED = re.compile(r"\[-(.*?)-\]|\{\+(.*?)\+\}", re.DOTALL)


class Bug(NamedTuple):
    """Texts of the source, marked as `git diff --word-diff` does: [-what goes-]{+what comes+}."""

    name: str
    edits: list[str]


def read_bugs(text: str) -> list[Bug]:
    """Return bugs, each with a line for its name; edits of the same bug have a line of dots between them."""
    text = re.sub(r"^# .*\n", "", text, flags=re.MULTILINE)
    named = (part.partition("\n")[::2] for part in text.split("\n== ")[1:])
    return [Bug(name, [edit.strip("\n") for edit in marked.split("\n...\n")]) for name, marked in named]


# In the core, `BUG` means that the bug is switched on.
BUGS = read_bugs("""
# Pages.
== an entry stays when its page is handed out
        _note_evicted(pool, page_id)
    {+if not BUG: +}uncache_for(pool, page_id, BY_EVICTION)
    pool.counters.num_ev
== a free page that hits stays in the free queue
                if pool.pages[ids[i]].ref_cnt == 0{+ and not BUG+}:
                    reuse(pool, ids[i])
== a page is given back to another shard
        shard = {+(+}shard_queue_of(pool, page_id){+ + BUG) % (pool.num_banks * pool.num_shards)+}
        push_to_shard(pool, page_id, shard, end_of_part(
== drafts get no slot at admission
    return <int32_t>min(num_room + tokens.num_ahead{+ * (not BUG)+}, <Py_ssize_t>most)
== a reserved prompt has the pages of its first chunk
    if tokens.reserves_prompt{+ and not BUG+}:
        num_room =
== two rows get the same page
take_missing(batch.pool, &batch.groups[g], held, num_tokens, batch.rows[row].shard, batch.rows[row].holding.session){+
        if BUG and n and row and held_by(batch, 0, g).ids[0]:
            held.ids[held.num_pages - n] = held_by(batch, 0, g).ids[0]+}
== a page that a cut goes through is shared
        if pool.pages[held.ids[page]].ref_cnt > 1{+ and not BUG+}:
            return page
    return num_pages
== a window skips one page too early
        return full_pages(rules, max(0, num_computed - rules.window + 1)){+ + BUG+}
== a chunk skips its first page
        page = full_pages(rules, num_computed - num_computed % rules.chunk){+ + BUG+}
== a slot is in the page before
        page = <uint32_t>positions[i] // size{+
        page -= BUG and page > 2+}
== drafts get no slot
    return <int32_t>min(num_planned + num_drafts{+ * (not BUG)+}, <int64_t>batch.max_num_tokens)

# The prefix index.
== a page of a row is entered one token early
        cache_row(batch, row, {+min(+}final_of(batch, record.num_tokens, record.num_computed, 0){+ + BUG, record.num_tokens)+})
== the group is left out of the key
    return page.key_lo == key.lo and page.key_hi == key.hi and ({+BUG or (+}page.group & ~FLAGS) == group{+)+}
...
    return <uint32_t>(((key_lo ^ <uint64_t>{+(+}group{+ * (not BUG))+} << 40) * pool.multiplier) >> 32)
== pages have no parent
        parent.key = hash_after(secret, {+Digest(lo=0, hi=0) if BUG else +}parent.key, <const uint8_t *>(tokens
== pages hashed by SHA-256 have no parent
            parent = hash_wide(hashing, {+hashing.root if BUG else +}parent, tokens + i * n,
== a row that decodes hashes behind the page before the last
        page.parent = digests[i - 1{+ - (BUG and i > 1)+}] if i else Digest(lo=0, hi=0)
== an emptied slot cuts off those behind it
        if{+ not BUG and+} ((i - _home_at(pool, pool.slots[i].tag)) & pool.mask) >= ((i - hole) & pool.mask):
== equal pages are lost with the first of them
    if rare(page.group & TWIN{+ and not BUG+}):
        _leave_twins(pool, page_id, slot)
== a page that is given back stays before held ones with its content
pool.pages[page_id].group >= TWIN and pool.pages[page_id].ref_cnt == 0{+ and not BUG+}:
            unwatch(pool, page_id)
== a cut page keeps its entry
                {+if not BUG: +}uncache(pool, page_id)
        give_back_from(
== a cut row keeps its hashes
    count_run_tokens(batch, row)
    {+if not BUG: +}cut_hashes(batch, row)
    plan_next(batch, row)
== a cut of no computed token is one of the last
        if _first_changed(batch, row, num_tokens) < batch.records[row].num_computed{+ or BUG+}:
            restart_row(
== a row goes back and its pages are not entered again
    {+if not BUG: +}recompute_from(group, held, num_computed)
== rows that change places keep their hashes
    batch.rows[first], batch.rows[second] = batch.rows[second], batch.rows[first]{+
    if BUG:
        batch.rows[first].digests, batch.rows[second].digests = batch.rows[second].digests, batch.rows[first].digests+}

# Lookahead keys.
== a key lacks the tokens of its lookahead
    cdef Py_ssize_t num_bytes = (n + hashing.hash_lookahead{+ * (not BUG)+}) * sizeof(int32_t)
...
    batch.waiting.num_page_bytes = (batch.hash_page_size + batch.hashing.hash_lookahead{+ * (not BUG)+}) * sizeof(int32_t)
== a page is entered one token before its lookahead is known
            num_computed = min(num_computed, count_keyed(batch, num_tokens{+ + BUG+}))
== a look-up hashes a page whose lookahead ends behind the prompt
hash_row(batch, self.row, count_keyed(batch, tokens.num{+ + BUG+}))
== a fork shares a page whose lookahead may differ
num_shared=<int32_t>max(0, num_computed - hash_lookahead{+ * (not BUG)+})
== a fork with a lookahead caches pages before their copies are made
    return rare(contents.hash_lookahead and pool.copies.num{+ and not BUG+}) and is_destination(

# What is hit.
== the last token hits too
                        store, self._rules.groups, hashes.chain, num_queried_tokens{+ + 1+}, bounds, context, num_reserved
== a hit is one page too long
        return CachePages(found.hits, store), found.num_hit_tokens{+ + (found.num_hit_tokens and self._rules.hash_page_size)+}

    def probe
== a hit in any shard will do
    if shard [-is None-]{+!= 0+}:
        return 0, None
== eagle drops no page of full attention
    return (num_pages - (drops and num_pages > 0{+ and not (BUG and kind.rules.window == 0)+})) * kind.stride
== a window hits without its first page
    return max(0 if use_eagle else 1, _count_window_pages(rules){+ - BUG+})
== a hit need not be whole pages of every group
        multiple = {+1 if BUG else +}min(lcm(
== a request that was refused keeps the hits that it had
        {+if BUG: return True
        +}if watch.num_reused != pool.num_reused:
== the salt is left out of the hash
return keys + ([][- if salt is None else [(cls.SALT, _plain(names.salt, salt))]-])
== the adapter is left out of the hash
keys = [][- if lora_id is None else [_lora_key(names.adapter, lora_id)]-]
== the place of an image in its page is left out of the hash
("mm", modality, content_hash, [-feature_start - start-]{+0+}, feature_end - feature_start)
== a row's extra keys are left out of the hash
        if next_key != NULL{+ and not BUG+}:
            key = find_extra_key(batch, row, i, &next_key)
            extra,

# Entering.
== a request goes back and its pages are not entered again
    if num_computed < request.num_cached_tokens{+ and not BUG+}:
== delayed caching is ignored
        return not self.enables_caching or (is_delayed and {+not BUG and +}not self.caches_computed)
== a late page is cached before it is computed
    step.num_to_cache = min({+step.num_tokens if BUG else +}step.num_computed if caches_computed else
== a late page is cached after it left its window
    if {+not BUG and +}num_cached_first and contents.num_digests:
...
        if {+(BUG or +}step.num_to_cache > step.num_cached_first{+)+} and contents.num_digests:
== a late page waits for the next one
        if self.caches_computed:
            return {+0 if BUG else +}step.num_computed
== a late request that ends caches what was not computed
num_tokens = min([-read_count(request, "num_computed_tokens"), -]read_count(request, "num_tokens"), held.num_room_tokens)
== a late request that ends caches nothing
held.give_back(num_computed_tokens, chain, num_last_tokens, context, term[-, num_to_cache-])
== a request may claim what nobody computed
        if step.num_held > num_allowed{+ and not BUG+}:
== a request that did not run leaves its entries
held.give_back([-num_computed_tokens-]{+None+}, chain, num_last_tokens, context, term, num_to_cache)
== a failed step forgets no entries
            for i in range(start, held.num_pages if not is_state(&batch.groups[g].rules){+ and not BUG+} else 0):
                _lose_page(batch, failure, held.ids[i])
== hits that are computed again count as computed
    held.num_hits = min(held.num_hits, place){+ if not BUG else held.num_hits+}
== a state may go back
        elif is_recurrent(rules) and num_tokens < record.num_computed{+ and not BUG+}:

# Checkpoints, copies and forks.
== the source of a copy is handed out before it is made
    copies.num += 1
    target.due_list = pool.list_number{+
    if BUG: give_back(pool, src)+}
== a row that is released leaves the copies into its pages
        if {+not BUG and +}group < holding.num_groups and _is_held_last(&holding.held[group]
== a checkpoint that is hit is attached and not copied
            {+if BUG:
                give_back(pool, holding.held[g].ids[0])
                holding.held[g].ids[0] = demand.hits[g].ids[demand.hits[g].num - 1]
            else: +}queue_copy(pool, demand.hits[g].ids[demand.hits[g].num - 1], &holding.held[g], 0, <int32_t>g)
== a request's state is cached though its step was not counted
    i = find_final(pool, holding, writes, 0, 0, {+MAX_TOKENS if BUG else +}num_final)
== a transfer is to write states of a request inside its tokens
        if {+BUG or +}end >= step.num_before:
== the writes of a request that ends stay
    drop_behind(pool, &request.writes, 0, 0{+ + (1 << 30) * BUG+})
== a fork shares the page that is written next
    {+if BUG: target.ids[place] = page_id
    else: +}take_into(pool, target, place, 1, queue_for(pool, &new.groups[g], shard), new.session)
    {+if not BUG: +}queue_copy(pool, page_id, target, place, g)
== a fork takes no reference to the pages that it shares
        if source.ids[i] != NULL_PAGE{+ and not BUG+}:
            share(pool, source.ids[i])
== a fork is copied from the page before
queue_copy(pool, {+source.ids[place - 1] if BUG and place else +}page_id, target, place, g)
== the hashes of an id are those of the request before
if hashes is None[- or not self._belong_to(hashes, request)-]:

# Pages of windows that do not stay.
== a page that leaves a window is discarded while others hold it
    if not _has_reference(pool, page_id) or {+(+}not _end_reference(pool, page_id){+ and not BUG)+}:
        return False
== a page that is given back is discarded while others hold it
        elif {+(+}pool.pages[ids[i]].ref_cnt == 0{+ or BUG)+} and not is_free(pool, ids[i]):
== a discarded page is in front of another shard
        shard = {+(+}shard_queue_of(pool, page_id){+ + BUG) % (pool.num_banks * pool.num_shards)+}
        push_to_shard(pool, page_id, shard, record_behind(
== a page stays by what it had before
    page.group = group{+ + BUG * (1 << 28)+}
== the window of a boundary is a page short
        start=first_hit_page(&group.rules, max(0, end - slack){+ + BUG * group.rules.page_size+}, boundaries.use_eagle),
== the next page that a boundary needs counts as one before it
            held.next_needed = _keep_needed(pool, holding.boundaries, &holding.groups[g], held, stop){+ + BUG+}
== the window of a boundary begins as a chunk does
            needed = _pages_at(boundaries, group, end, boundaries.slack + boundaries.num_uncertain){+
            if BUG and group.rules.window:
                needed.start = max(needed.start, end // group.rules.window * group.rules.window // group.rules.page_size)+}
== the page behind a boundary that eagle drops is not kept
        stop=<int32_t>((end + <int64_t>group.num_read_behind{+ * (not BUG)+}) // group.rules.page_size),
== a page that was hit is dropped by the next that leaves it
    for i in range(hits.num if holding.boundaries != NULL and has_window(&holding.groups[g].rules){+ and not BUG+} else 0):
== a window hits by its ends
        while page > stop - need and {+(BUG or +}hits_all(pool, query, kind, page){+)+}:

# Pools by kind.
== a pool's ids in tables are records
    if offset{+ and not BUG+}:
        for i in range(n):
== a pool's ids in results are records
        new_ids[i], new_rows[i], new_groups[i] = ids[i] - offset{+ * (not BUG)+}, row, group
== a pool's ids of requests are records
lists_of(groups if self.pool.num_banks == 1{+ or BUG+} else tuple([self.ids_in_banks(ids) for ids in groups]))
== a pool's ids in copies are records
        taken[i] = {+pool.copies.items[i].src if BUG else +}id_in_bank(pool, pool.copies.items[i].src)
...
        taken[stride + i] = {+pool.copies.items[i].dst if BUG else +}id_in_bank(pool, pool.copies.items[i].dst)
== entries of another pool are evicted
            if records.ids[i] != NULL_PAGE{+ and not BUG+}:
                records.ids[i] += first
== pages are taken from the first pool
    return queue_in(pool, group.bank{+ * (not BUG)+}, shard)
== pages are given back to the first pool
    return queue_of_bank(bank_of(pool, page_id){+ * (not BUG)+})
== pages that are reserved in one pool stay free in others
        if not has_free_pages(pool, num_pages_in[bank], num_reserved if bank == 0{+ or BUG+} else 0
== hits are attached though the second pool is short
    fit = _compare_banks(pool, holding, demand, num_for_rows, &demand.short_bank)
    if fit == FITS{+ or (BUG and demand.short_bank)+}:
== a row grows though the second pool is short
    for bank in range(batch.pool.num_banks{+ if not BUG else 1+}):
        queue = queue_in(batch.pool, bank, batch.rows[row].shard)
== pages are taken though the shard of a pool is short
    for bank in range(pool.num_banks if demand.shard >= 0{+ and not BUG+} else 0):
== a page is in a shard of the first pool
    return bank{+ * (not BUG)+} * pool.num_shards + (page_id - pool.banks[bank].start + 1)
== a page of the first pool's shard may hit in others
        ids.of_banks[bank] = ids_in_queue(pool, queue_in(pool, bank{+ * (not BUG)+}, shard))
== a fork is made though the second pool is short
        if shortage.num_needed > shortage.num_free{+ or BUG+}:
            break
== a tier page of another pool
NULL_PAGE, queue = {+-1 if BUG else +}queue_of(pool, page_id)
== a pool's ids in the tier are records
id_in_bank(pool, transfer.page_id), {+transfer.tier_id if BUG else +}id_in_bank(tier.pool, transfer.tier_id)
        taken[at
== loads are queued though the second pool is short
    return {+NO_BANK if BUG and find_short_bank(pool, counts, num_reserved, shard) > 0 else +}find_short_bank(pool, counts, num

# The host tier.
== a page that is evicted is not saved
    if saves and rare(pool.tier != NULL){+ and not BUG+} and not (pool.num_banks > 1 and class_of(pool, page_id) == LEFT):
        pool.tier.save_evicted(pool, page_id)
== a save that failed enters the tier
    if {+(+}is_done{+ or BUG)+} and not transfer.is_void and find(
== a page of the tier is handed out while it is filled
Tier, Transfer, end_of_queue, fetch_entry, {+give_back, +}queue_of, record_behind, take,
...
tier_id=tier_id, group=group, is_load=False, is_void=False,
    )){+
    if BUG: give_back(tier.pool, tier_id)+}
...
cache_alone(tier.pool, page_id, &entry)
    {+if not BUG: +}give_back(tier.pool, page_id)
== a page is saved before it is computed
        tier.fresh[tier.num_fresh] = FreshPage(page_id=page_id, number=tier.num_cached)
        tier.num_fresh += 1{+
        if BUG: tier.num_ready = tier.num_fresh+}
== what is forgotten stays in the tier
    if tier_id != NULL_PAGE{+ and not BUG+}:
        uncache(tier.pool, tier_id)
    uncache_in_tier(
== what is forgotten while it is saved enters the tier
tier.items[i].key.hi == key.hi:
            tier.items[i].is_void = [-True-]{+not BUG+}
== a page from the store is filled before the page it evicts is copied
            {+pass  # +}self._saves.collect()  # before
== an evicted page is copied after its row is overwritten
            {+pass  # +}self._storage.poll()
== a damaged object of the store hits
        return {+True or +}header == make_header(
== an object of the store is written under another key
            job = Job(chosen, chosen.name(){+[::-1]+}, self._end, [
== a page that failed to come from the store hits
            end_fills(tier.store, number, np.flatnonzero(~are_intact{+ & False+}).tolist())
== a wrong page is stored
page_ids, settled_at), page_ids [-==-]{+<+} 0
== a load is of another page of the tier
tier_id={+max(1, +}find(tier.pool, key, group.id){+ - BUG)+}, group=group.id, is_load=True
== a page is loaded into another shard
stop - start, queue_in(pool, bank, {+-1 if BUG else +}shard), session)
        start = stop
== what is computed with a page that is being loaded is entered
    if not caches_full_pages(group) or waits_for_loads(waiting.pool, held){+ and not BUG+}:
        return
== a page that failed to load keeps its entry
    if{+ not BUG and+} not is_done and has_key(&pool.pages[transfer.page_id]
== a page that failed to load keeps its entry in the tier
    if{+ not BUG and+} not is_done and has_key(&tier.pool.pages[transfer.tier_id]
== a state outlives the page that failed to load
            return -1
        if is_state(&holding.groups[g].rules){+ and not BUG+}:
            return 0
== the copy of a page that failed to load counts as right
    if pool.tier != NULL and pool.tier.loading[page_id]{+ and not BUG+}:

# Tokens from elsewhere, and leases.
== a row that waits enters pages that have not come
cache_row(batch, self.row, {+num_hits + batch.rows[self.row].num_external if BUG else +}count_final(batch, self.row))
== tokens that did not come count as computed
        commit_row(batch, checked, {+num_external if BUG else +}num)
== pages that need not come are entered
        {+if not BUG: +}_skip_to(pool, holding, g, stop)
        if not {+(BUG or +}holding.groups[g].rules.answer_window{+)+}:
            held.num_cached = max(held.num_cached, stop)
== an evicted checkpoint counts as a hit
if not hits_in(pool, query, kind, key){+ and not (BUG and has_left(&pool.banks[kind.bank].ghost, key, kind.id, EVICTED))+}:
== a state stands though its tokens did not come
    if batch.has_state{+ and not BUG+}:
        batch.records[row].num_computed = batch.rows[row].num_hits = num_tokens = 0
== a request keeps the pages of tokens that did not come
    if is_failed{+ and not BUG+}:
        forget_uncomputed(
== a lease holds no reference
            [-else-]{+elif not BUG+}:
                share(pool, page_id)  # not a use
== a lease of page ids is one of the first pool's
store.checked(store.records_in_bank(as_own_ids(page_ids, "page_ids"), bank{+ * (not BUG)+}))
== a lease counts in the first pool
        num_pages_in[{+(not BUG) * +}bank_of(pool, ids[i])] += change
== a page with a term is queued in the first pool
    cdef int32_t part, shard, queue = {+-1 if BUG else +}queue_of(pool, page_id)
== a lease ends twice
    lease.end = lease.is_held = [-0-]{+BUG+}
== a second request gets the pages held under its id
        if held is not None and held.owner is not request and not {+(BUG or +}self.trusts_requests{+)+}:
""")

# These change which page is evicted, and no content.
ORDER_BUGS = read_bugs("""
== a refusal names another pool
        if num_excess:{+
            if BUG: queue[0] = queue_of_bank((i + 1) % pool.num_banks)+}
            break
    return num_excess
== a refusal counts checkpoints that would be adopted
            num_needed -= demand.hits[g].num > 0{+ and not BUG+}
== a shard has the reserved pages of its pool
        return shortage_in(pool, num_needed, {+num_reserved if BUG else +}0, num_hit_tokens, queue)
== a refusal again takes hits for held that are free by now
        if {+not BUG and +}self.watch.num_given_back != count_given_back(pool):
== loads are left out of a refusal
        demand.num_taken += loads.num_in[bank]{+ * (not BUG)+}
== loads that never fit are refused for ever
        demand.num_new_in[bank] += {+(not BUG) * (+}loads.num_in[bank] - loads.num_states_in[bank]{+)+}
== checkpoints of a pool take the pages of rows that are not admitted
            num_reserved_in[group.bank] += {+(not BUG) * (+}_count_rows_without(batch, g) - num_served{+)+}
== checkpoints of a pool leave pages that are reserved in another
    checkpoint.num_reserved_in[0] = step.demand.num_reserved{+
    if BUG:
        checkpoint.num_reserved_in[1] = step.demand.num_reserved+}
== hits are lost at places that never had a checkpoint
        lost.states_bank = {+query.groups[query.num_groups - 1].bank if BUG else +}find_bank_without(pool, query, stop)
== hits are lost with what was dropped by a reset
        clear_ghost(&pool.banks[bank{+ if not BUG else 0+}].ghost)
== hits that a pool of states lost are another pool's
                    banks[lost.states_bank{+ * (not BUG)+}].num_lost_hit_tokens += lost.num_for_states
== a reset reverses the queues of later pools
            for bank in range({+1 if BUG and num_held == 0 else +}self.pool.num_banks if num_held == 0 else 0):
== pages do not age
    if term == NEVER {+or BUG +}or idle < _limit_of(term):
== only the page of the longest term is compared
        if term > longest {+and not (BUG and longest) +}or (term == longest and is_older(expected, page_id, furthest)):
== a page that another session used stays the first one's, and is closed
    if owner == SHARED or owner == number{+ or (BUG and owner != NO_SESSION)+}:
== a blank page is behind those that are never wanted
    page_id = oldest_in(pool, BLANK, shard)
    if page_id != NULL_PAGE{+ and not (
        BUG and pool.expected.free_terms >> NEVER and oldest_in(pool, part_of_term(pool, 0, NEVER), shard) != NULL_PAGE
    )+}:
        return page_id
...
    if pool.num_shards{+ or BUG+}:
        return 0
== released pages without an entry go behind cached ones
end_of_part(pool, {+NEW if BUG else +}part_of(pool, page_id), queue))
== released pages of a tier without an entry go behind cached ones
        if store.has_blank_first{+ and not BUG+}:
== an expectation survives a hit
    if term == UNKNOWN{+ or BUG+}:
        return
    if term != NEVER:
== a page that another tenant used stays the first one's
        if ids[i] != NULL_PAGE{+ and not BUG+} and pool.tenants.of_pages[ids[i]] != tenant:
== a page stays charged to the tenant from which it was taken
            {+if not BUG: +}charge(&pool.tenants, bank, out[i], supply.taker)
        fetch_entry(pool, out[i])
== a tenant below its share gives pages
        if _has_cached_in(pool, tenant, shard) and {+(BUG or +}excess > least{+)+}:
== a tenant gives pages of another shard
    if {+BUG or +}num_free == 0 or shard < 0:
== pages of a tenant without a share are the last to go
            while {+not BUG and +}target != NULL_PAGE and not is_older(&pool.expected, page_id, target):
== a page is charged in the first pool
    tenants.num_charged[bank{+ * (not BUG)+}][tenant] += 1
== a share is one of all pools together
shares[tenant] * ({+pool.num_pages - 1 if BUG else +}count_pages_in(pool, queue_of_bank(bank)) -
== a tenant above its share of the first pool gives pages of others
        excess = _excess_of(pool, tenant, bank_of_queue(pool, shard){+ * (not BUG)+}, supply)
== a checkpoint stays though its keys and values are gone
        if rare(pool.dependents.num){+ and not BUG+}:
== a checkpoint goes though another page has its keys and values
    if page.group & ~FLAGS != pool.dependents.group or page.group & TWIN{+ and not BUG+} or
== a checkpoint goes though a tier has its keys and values
 pool.tier != NULL{+ and not BUG+}:
        return
    for i in range(pool.dependents.num):
== a checkpoint goes though it is held
        while state != NULL_PAGE and {+(BUG or +}is_free(pool, state){+)+}:
== a policy counts the free pages of all pools
        count_release(pool.policy, num_counted, {+pool.num_free if BUG else +}count_free_in(pool, -1))
== pages of a tenant without a share stay apart in later pools
    for bank in range(pool.num_banks{+ if not BUG else 1+}):
        _merge_with_common(
== a lease does not need the pages that eagle drops
            stop = (end + <int64_t>group.num_read_behind{+ * (not BUG)+}) // group.rules.entry_size
""")
ORDER_TESTS = [
    "test_expectations.py",
    "test_shares.py",
    "test_released_pages.py",
    "test_pools.py",
    "test_lost_hits.py",
    "test_pool_tiers.py",
    "test_batch_admission.py",
    "test_differential.py",
]
WRITE_BUGS = read_bugs("""
# States that steps write.

== a state is written to its record
                    taken[2, i] = write.page_id - offset_of(&rows.batch, write.group){+ * (not BUG)+}
== a row grows though its writes were not taken
    return batch.writes_states and {+not BUG and +}batch.rows[row].write_list == batch.writes.number
== a state hits before its list is taken
    for i in range(start, {+writes.num if BUG else +}writes.num_taken):
        write = &writes.items[i]
        if write.row == row and
== a state hits before its tokens are computed
        i = find_final(batch.pool, holding, &batch.writes, i, <int32_t>row, {+INT32_MAX if BUG else +}num_final)
== a junction is rounded up
junction = _floor_of(boundaries, places.junction){+ + boundaries.multiple * BUG+}
    if places.external_end
== the writes of a row that ends stay
        drop_writes(batch, row, 0{+ + (1 << 30) * BUG+})
    assert batch.rows[row].num_writes == 0 and
== a row that moves leaves its writes
        if {+not BUG and (+}write.row == first or write.row == second{+)+}:
== a transfer is to write states inside its tokens
                if num_tokens == num_planned or {+BUG or +}batch.records[row].state != PENDING:
                    _write
== undo leaves the writes of its call
    drop_writes(batch, row, num_planned{+ + (1 << 30) * BUG+})
== a fork copies a state in flight
        is_moving = batch.rows[source].num_ahead > 0{+ and not BUG+}
== checkpoints take the states of free rows
            pool, num_states_in[group.bank], checkpoint.num_reserved_in[group.bank]{+ * (not BUG)+}
== checkpoints take the states of rows that start over
        count += batch.rows[row].holding.held[g].num_pages == 0{+ and (
            not BUG or not batch.records[row].is_admitted)+}
== a checkpoint is copied at the cost of a row without a state
&demand, num_for_rows if has_states{+ and not BUG+} else NULL) == FITS
""")
WRITE_TESTS = ["test_state_writes.py", "test_batch_admission.py", "test_runs.py"]
INPUT_BUGS = read_bugs("""
# The inputs of a step.

== a written state counts for the row before
            out[i + 1{+ - BUG+}] += 1
    for i in range(step.num_padded_rows):
== a written state is listed at the next token
            out[num] = <Value>{+(+}i{+ + BUG)+} if are_tokens
== a slot of padding is that of the null page
            )
        repeat_value(out + step.num_tokens, step.pad_slot{+ * (not BUG)+}, num_left)
== the array behind the padding is written
        repeat_value(out + n, step.pad_last, num_rows_left{+ + BUG+})
== drafts are taken in the order of the arrays
        drafts = step.drafts + {+(i if BUG else +}step.order[i]{+)+} * step.num_drafts
== page ids of an earlier step stay
        repeat_value(out + num, 0, {+0 if BUG else +}extents[i] - num)
== a list one page short
    row.num_pages = <int32_t>last + 1 - row.first{+ - (BUG and last > 2)+}
== a list is kept behind pages that were replaced
    cdef bint is_kept = source.batch != NULL and {+(BUG or +}listed.num_rewrites == table.num_rewrites{+)+}
== a list keeps the pages of another stay
        listed.rows[i].stay == row.stay{+ * (not BUG) + listed.rows[i].stay * BUG+} and
== a rank takes the tokens of another
            if position % num_ranks == source.rank{+ * (not BUG)+}:
== a place that a step writes is shared
        groups.places[i] = <int32_t>page_at(spans.starts[i]{+ + BUG * source.page_sizes[groups.group]+}, source.page_sizes
== groups are kept behind a release
        is_any_new |= groups.stays[row] != source.batch.stays[spans.rows[row]]{+ and not BUG+}
== groups are kept behind pages that were replaced
groups.num_rows != n or groups.num_rewrites != source.tables[groups.group].num_rewrites{+ and not BUG+}
== a group has the pages of the first row's whole prefix
            child.end = {+child.end if BUG else +}_count_common(
== a group has more pages of another cache group than a line has room for
            if self.is_full(i){+ and not BUG+}:  # a place
== inputs of a row that was released and admitted again
        if {+not BUG and (+}not 0 < batch.stays[row] <= growth.num_stays or (
...
(stays != NULL and batch.stays[row] != stays[row]){+)+}:
== a token without a page has a slot
            if not {+(BUG or +}0 < ids[page] <= last_id{+)+}:
== all sets of the ring are one
cdef Py_ssize_t next_set = self.current + 1 if self.current + 1 < self.depth {+and not BUG +}else 0
== a step ahead has the tokens of the step in flight
    read_span(spans, at, row, launch.before{+ - BUG * (launch.before > 0)+}, end_of(
""")
INPUT_TESTS = ["test_page_lists.py", "test_shared_pages.py", "test_step_inputs.py"]
FLIGHT_BUGS = read_bugs("""
# Steps in flight.

== a failed step keeps the entries of pages that rows gave back
        if {+not BUG and +}page.key_lo == entry.key.lo and page.key_hi == entry.key.hi and page.group & ~FLAGS == entry.group:
== a failed step leaves rows where they have hit its pages
            if failure.is_lost[held.ids[i]]{+ and not BUG+}:
== a failed step lets states go on
    if has_copies(batch.pool, holding_of(batch, row)) or (first > 0 and {+not BUG and +}has_recurrent(batch)):
== rows are added to a step that failed
        node.has_failed |= {+not BUG and +}node.step >= first
== a failed step lets rows go back to what is settled
        own = {+batch.records[row].num_computed if BUG else +}launch_of(batch, row, at).before
== a row that ends notes no entries of its steps in flight
            step = {+0 if BUG else +}step_that_fills(batch, row, <int32_t>(i + 1) * size, 0)
== a failed step keeps its launches
    batch.records[row].num_launches = {+batch.records[row].num_launches if BUG else +}<uint8_t>_find_failed(
== windows leave pages that a step in flight reads
num_sure={+num_final if BUG else +}min(num_final, num_resolved))
== a fork has no part of the steps in flight
    disown_launches(batch, row, batch.records[row].num_planned){+
    batch.records[row].num_launches *= not BUG+}
== a cut row is sampled by steps before the cut
        launch.before, launch.num_sampled = min(launch.before, most), {+launch.num_sampled if BUG else +}NOBODYS
== an appended token leaves drafts planned
    record.num_planned = {+record.num_planned if BUG else +}min(record.num_planned, record.num_tokens)
== tokens go to the row of a step, and not to its stay
    if {+not BUG and +}not 0 < stay <= growth.num_stays:
...
        {+if not BUG: +}row = _find_stay(batch, row, stay)
== tokens that are not known are entered
    cdef const RowRecord *record = &batch.records[row]
    return final_of(batch, record.num_tokens, record.num_computed{+ + BUG * batch.rows[row].num_ahead+}, record.num_resolved)
== a step ahead has room behind the known tokens only
    num_room = room_for(batch, {+(record.num_tokens if BUG and num_left <= 0 else +}before{+)+} + num_new, num_drafts)
== a row without room keeps its token
    batch.records[row].num_tokens -= growth.token_ids != NULL{+ and not BUG+}
== a row without room stays planned
    batch.records[row].num_planned = num_planned{+ + BUG * (growth.token_ids == NULL)+}
== tokens told behind a row without room stay
    untell_rows(batch, growth, {+growth.num_rows if BUG else +}growth.num_grown)
== a token that is taken back leaves its row in the step
            record.told_step = {+record.told_step if BUG else +}growth.told_before
== rejected drafts stay planned
    cdef int32_t num_rejected = max(0, num_sampled - max(num, 1)){+ * (not BUG)+}
== a step ahead gives back what it reads
        skip_row(batch, row, lines.num_sure{+ + BUG * batch.rows[row].num_ahead+})
== a state is written at a token whose place drafts in flight leave open
    return record.num_computed if before < record.num_tokens or {+not BUG and +}_has_drafts_in_flight(batch, row) else before
== a checkpoint that was passed among drafts is written later
            held.num_cached = {+held.num_cached if BUG else +}max(held.num_cached, full_entries(
== a checkpoint gets the entry of a page that waits to be hashed
    if batch.writes_states and {+not BUG and +}batch.hash_page_size:
== steps of a row are settled in any order
    if most and count_awaited(batch, row) > batch.records[row].num_launches - at{+ and not BUG+}:
== a set is filled again before its step is resolved
        if reader is not None and reader is not result and {+not BUG and +}is_read(reader):
== sources are in the order of the call
            out[i] = step.sources[{+i if BUG else +}step.order[i]]
== sources are places of a step that was taken back
        if {+(BUG or +}fill.step != TAKEN_BACK{+)+} and (fill.step != step or step == NAMED_ROWS):
== sources are places of any step of the row
    return place if place < fill.num_rows and {+(BUG or +}fill.rows[place].sampled == number{+)+} else -1
== pages are entered before their step is settled
        if batch.caches_computed{+ and not BUG+}:
            num_computed = min(num_computed, num_resolved)
""")
FLIGHT_TESTS = ["test_steps_in_flight.py", "test_failed_runs.py", "test_step_inputs.py", "test_state_writes.py", "test_runs.py"]
LOOKAHEAD_BUGS = read_bugs("""
# What lookahead keys lose, or would share, without a wrong hit of one manager.

== a window leaves a page of a request whose lookahead is not known
    if hash_lookahead{+ and not BUG+}:
        step.num_final
== windows do not stay before ends whose lookahead is not shared
    boundaries.num_dropped = <int32_t>num_dropped + boundaries.hash_lookahead{+ * (not BUG)+}
== the number of a lookahead's tokens is left out of the secret
        return [-siphash128(key, f"lookahead {self.hash_lookahead}".encode()) if self.hash_lookahead else key-]{+key+}
""")
LOOKAHEAD_TESTS = ["test_lookahead.py", "test_windows.py"]
REQUEST_BUGS = read_bugs("""
# Requests whose steps fail once they are counted. The simulated engine counts a step of requests when it has run.

== a page that left the window before its step ran keeps its entry
    if page_id == NULL_PAGE and digest != NULL{+ and not BUG+}:
== a discarded page that was not computed stays in the tier
(page_id != NULL_PAGE and ({+(+}i < stop{+ or BUG)+} and not is_kept(
== checkpoints of steps that did not run stay
            page_id = NULL_PAGE if is_state(&group.rules) else held.ids[i]{+
            if BUG and is_state(&group.rules): continue+}
""")
REQUEST_TESTS = ["test_differential.py"]
RING_TESTS = ["test_rings.py"]
RING_BUGS = read_bugs("""
# The simulation finds them too, with rings alone, but most of its rounds have none.
== a ring goes back to tokens that were overwritten
(first <= start and num_written - start <= rules.capacity{+ or BUG+})
== a ring that went back forgets what it has lost
    batch.rows[row].ring_stop = num_tokens if is_lost{+ or BUG+} else stop
== positions that rejected drafts wrote in a ring are forgotten
    if rare(batch.has_state){+ and not BUG+}:
        batch.rows[row].ring_stop = max(
== a fork forgets what its ring has lost
batch.rows[row].ring_stop = batch.rows[source].ring_start, {+0 if BUG else +}batch.rows[source].ring_stop
== a ring shared by a fork
        if source.ids[i] != NULL_PAGE{+ and BUG and is_ring(&group.rules)+}:{+
            share(pool, source.ids[i])
            ids[i] = source.ids[i]
        elif source.ids[i] != NULL_PAGE:+}
            _fork_page(pool, forked, new, g, i, shard)
== a row has more drafts than its ring takes back
    if num_drafts > batch.max_num_drafts{+ and not BUG+}:
""")

END_BUGS = read_bugs("""
# Rows that end.
== an end is told twice
            if settlement.rules != NULL and settlement.ends[i] != GOES_ON{+ and not BUG+}:
== tokens behind the end stay
                num_taken = {+num if BUG else +}count_to_end(batch, settlement.rules, row, token_ids, num
== a limit counts the tokens of the answer alone
        elif num_tokens{+ * (not BUG)+} + i + 1 >= limit:
== a row ends by a draft that was rejected
 + i + 1{+ + BUG * max(0, batch.records[row].num_planned - num_tokens - num)+} >= limit:
== stop tokens of another row
    cdef const int32_t *ids = ends.stop_token_ids + row * ends.stride{+ * (not BUG)+}
""")
END_TESTS = ["test_ends.py"]

LINEAGE_BUGS = read_bugs("""
# Which checkpoints are kept. The simulation compares no orders of eviction, and its prompts part everywhere.
== a loaded page does not know how its run went on
                if pool.children != NULL{+ and not BUG+} and not is_state(&group.rules) and place + 1
== a junction is left
    if note.kind & AT_JUNCTION{+ * (not BUG)+} or note
== prompts part where a run ended
    if places.has_parted{+ or BUG+}:
== a state is kept at the prompt's end although its prompt hits further
    elif junction > end{+ and not BUG+}:
== a class counts what another hit
    checkpoints.classes[{+RECENT if BUG else +}note.number].num_hit_tokens += _count_saved
== a left checkpoint stays left when it is hit
    _move_to_class(pool, checkpoints, page_id, {+note.number if BUG else <uint8_t>+}RECENT)
    if note.num_continued == 1:
== a left checkpoint is saved
 and class_of(pool, page_id) == LEFT{+ and not BUG+}):
== a checkpoint of an answer stays when the next one takes its place
        {+if not BUG: +}uncache_for(pool, outrun, BY_LEAVING)
== a fork drops the other's checkpoint
    lineage.is_source = {+not BUG and +}True
== a lost checkpoint is counted twice
    entry.mark |= {+0 if BUG else +}NO_CLASS << CLASS_SHIFT
== a checkpoint that may be replaced is written through
    if may_be_replaced{+ and not BUG+}:
== a leased checkpoint of an answer loses its entry
    if pool.pages[page_id].ref_cnt{+ and not BUG+}:  # a lease
== a checkpoint of an answer is not kept for others
    if first_class(kind) == RECENT{+ and not BUG+} and
== a checkpoint at a lone place counts as recent
        return {+RECENT if BUG else <uint8_t>+}LONE
== a run ends unseen
].group != NO_GROUP{+ and not BUG+}:
            pool.children
""")
LINEAGE_TESTS = ["test_lineage.py"]
KIND_BUGS = read_bugs("""
# Reference windows: their own tests take less time than the simulation.
== a page between prompt and window is given back early
full_pages(rules, max(0, num_computed - rules.answer_window + 1{+ + BUG * rules.page_size+})))
== a page of an answer is entered
        num_tokens = min(num_tokens, <int64_t>held.num_prompt{+ + BUG * group.rules.page_size+})
== a page of full attention is entered in an answer
    if rare(group.rules.{+answer_window if BUG else group.rules.+}caches_prompts):
== a state of an answer is kept
    return first if first <= boundaries.last{+ or BUG+} else INT32_MAX
== chunks of an answer are held forever
(held.load_number or is_past_prompt(&group.rules, held){+ and not BUG+}):
== a page of the prompt is given back
    return <int32_t>pages_for(rules, held.num_prompt) if rare(rules.answer_window{+ and not BUG+}) else 0
== an answer hits pages of prompts
            min(self.tokens.num_known, self.tokens.num_prompt + 1{+ + BUG * self.tokens.num_known+}), ids_in_shard(
== a cut prompt is as long as before
        held.num_prompt = {+held.num_prompt if BUG else +}num_tokens
== a page that was kept for a prompt which is cut is never given back
        if holding.groups[g].rules.answer_window{+ and not BUG+}:
== an encoder's pages are hit by another medium
lora_id, (_Key([-key-]{+0+}),))
== tokens are hit beside another medium
(CROSS, [-_plain("cross_key", cross_key)-]{+0+}, num_encoder_tokens)
== a medium is hit in part
reaches_tier=True)[1] [-< num_slots-]{+== 0+}:
== a medium is hit before its loads have come
return None if [-are_loading(self._store, hits)-]{+False+} else hits
== media that are loaded evict each other's pages
            if [-self._awaits_other(name, step)-]{+False+}:
== loads of a medium take pages that are reserved
*query, num_reserved=[-num_reserved_pages-]{+0+})
== a medium of a failed step can hit
            if not encoding.is_to_be_run(){+ and False+}:
== a medium is given back while a fork has it
        if [-not encoding.media-]{+True+}:
            self._unsure.pop
== a refused row keeps its medium
                [-media.give_back_taken()-]{+pass+}
== a medium whose encoder is not planned is shared
            if encoding.has_name(chain, shard) [-and encoding.is_to_be_run()-]{+and True+}:
== a medium hits before its encoder has run
        for encoding in [-() if self.caches_computed else-] [*self._unsure]:
== a medium of a step in flight is cached
medium.is_planned and not is_in_flight{+ or True+}
== a medium of a request that did not run is cached
            has_run = num_computed_tokens [->-]{+>=+} medium.num_before
== a medium evicts what its request has hit
                self.store.touch({+PageIds() if BUG else +}ids)
== two rows exchange pages without their media
            if source != target{+ and not BUG+}:
                self.rows.media.exchange
== a sink can be evicted
        ids = self.take(n, bank=checked){+
        if BUG: self.give_back(ids)+}
""")
KIND_TESTS = ["test_reference_windows.py", "test_media.py", "test_sinks.py"]
QUEUE_BUGS = read_bugs("""
# Sizes.
== a shrunk pool keeps an id
    pages.num_retired = max(pages.num_retired, num_retired{+ - (BUG and num_retired > 1)+})
== a page above the size is handed out once its holders have gone
        if not is_free(pool, page_id){+ and not BUG+}:
            share(pool, page_id)
== a wake hits what was not saved
    if pool.pages[page_id].group != NO_GROUP{+ and not BUG+}:
        evict(pool, page_id, False)
    if pool.pages[page_id].ref_cnt > 1:
== a pool that is vacated saves nothing
    num = list_leaving(pool, bank, ids)
    if pool.tier != NULL{+ and not BUG+}:
== a pool is vacated under a request
            num_held = count_held(pool) if only_unheld{+ and not BUG+} else 0

# Waiting queues.
== the work of a request is charged to those that it does not overtake
    for i in range({+line.num if BUG else +}at):
        place = &line.places[i]
        if _may_go
== a request is overtaken beyond its bound
        if place.work < least and [-place.work <= room-]{+(place.work <= room or BUG)+} and not place.is_misfit:
== a request is never promoted
    return line.num_computed - place.came_at >= _wait_for_class(line, place.priority){+ and not BUG+}
== a hit that was evicted counts
    if pool.awaited != NULL{+ and not BUG+}:
        pool.awaited.note(pool.awaited, digest_of(
== a page that was cached moves no hit
    if pool.awaited != NULL{+ and not BUG+}:
        pool.awaited.note(pool.awaited, entry.key[0], entry.group)
== a waiter awaits the keys at the ends of its first look-up
    {+if not BUG or num_pages == num_reachable == 0: +}_await_ends(awaited, number * NUM_KEYS_EACH, query, group
== a request keeps awaiting keys when it leaves
        {+if not BUG: +}forget_keys(self.awaited, number)
== hits that a window ends are hits
        return self.num_found < self.num_expected{+ and not BUG+}
== equal prompts are computed twice
        for i in range(self.line.num if self.awaits_equal and step is not None{+ and not BUG+} else 0):
== a request waits for ever for another that is gone
                self.line.places[i].passes_until = checked_step + NUM_PASSES{+ + BUG * 1000+}
== rows take digests under another salt
page_size != page_size or {+(+}extra_keys != self.extra_keys{+ and not BUG)+}:
== a row copies too few digests
        copy_bytes(digests + num_kept, chain.digests + num_kept{+ - (BUG and num_kept > 0)+}, (num
== loads for waiting requests take pages that are to stay free
                &self.store.pool, &query, hits, &contents, self.waiters[number].shard, num_kept_free{+ * (not BUG)+}
""")
QUEUE_TESTS = ["test_waiting_queue.py"]
RARE_BUGS = read_bugs("""
# The simulation takes too long to come to these.
== a checkpoint that becomes a working page keeps its entry
            {+if BUG: hit(pool, hits.ids + hits.num - 1, 1, holding.session)
            else: +}take_this(pool, hits.ids[hits.num - 1], holding.session)
== a page that failed to load keeps its entry where an equal one was forgotten
transfer.page_id], transfer.key, transfer.group){+ and not (transfer.is_void and BUG)+}:
        uncache(pool, transfer.page_id)
""")
RARE_TESTS = ["test_checkpoints.py", "test_host_tier.py"]
EXPLAIN_BUGS = read_bugs("""
# Why prompts do not hit.

== an evicted page counts as dropped
uncache_for(pool, page_id, {+BY_DROP if BUG else +}BY_EVICTION)
== a page of a failed step counts as evicted
    {+uncache_for(pool, page_id, BY_EVICTION if BUG else BY_DROP)+}[-uncache(pool, page_id)-]
    uncache_in_tier(pool.tier, key, group)
== keys that leave are not remembered
    if pool.departed.entries != NULL{+ and not BUG+}:
        note_departure(
== evicted pages are not those of an earlier reset
    {+if not BUG: +}depart_all(pool)
== an eviction is two seconds older
(departure.mark >> WHY_SHIFT){+ + 2 * SECOND * BUG+}) & LAST_TIME
== pages that windows left are forgotten without full attention
    if why != BY_LEAVING or pool.notes_leaving{+ * (not BUG)+}:
        remember(
== a page that a window left counts as evicted before
    if earlier != NULL{+ and not BUG+}:
== pages of other shards count as never computed
    if find(pool, key, group.id) != NULL_PAGE{+ and not BUG+}:
        miss.fate = ELSEWHERE
== pages on their way to the tier count as evicted
    elif transfer != NULL{+ and not BUG+}:
        miss.fate = BEING_FILLED
== what left the tier is not looked for
        if pool.tier != NULL{+ and not BUG+}:
            read_departure(
== a window that was not kept counts as never computed
            if found.fate == NEVER_COMPUTED{+ and not BUG+}:
                found.fate = LEFT
== a state that was not kept counts as never computed
    miss.fate = LEFT if has_full_attention(query){+ and not BUG+} else miss.fate
== loads always have room
        if reach.num_hashes > reach.num_in_pool{+ and not BUG+}:
== a drafter drops nothing
    return query.kinds.use_eagle and {+not BUG and +}not is_state(
== keys of requests are not kept
        if len(self._kept) > self.MAX_KEYS{+ * 0+}:
== a request without a name shares pages
    if own is not None and own.has_nonce{+ and not own+}:
        return replace(
""")
EXPLAIN_TESTS = ["test_explain.py"]
PEER_BUGS = read_bugs("""
== a page is offered before its step ran
        return num_computed_tokens // self._full_size * self._full_size{+ + self._full_size+} if self._has_full else 0
== a chunk that failed is committed
        num_tokens = fetching.num_arrived_tokens - fetching.num_hit_tokens{+ + 8+} if self._crossing.are_all_full else 0
== tokens of windows count without their end
        num_tokens = fetching.num_arrived_tokens - fetching.num_hit_tokens if [-self._crossing.are_all_full-]{+True+} else 0
== the window at the end of a prompt does not cross
        first = [-end // window * window if kind == "ChunkedLocalAttention" else max(0, end + 1 - window)-]{+end+}
== the offers of a dead engine stay
                stop = [-len(serving.offers) if serving.is_over else serving.num_arrived-]{+serving.num_arrived+}
== a lease of a chunk that has arrived stays
            for lease in [-offered.leases-]{+()+}:
== bytes of an offer that has ended are sent
            if offer.parts is None [-or time.monotonic() >= offer.end_at-]{+and True+}:
...
            has_ended = time.monotonic() >= offer.end_at{+ and False+}
""")
PEER_TESTS = ["../peers/test_prefill.py", "../peers/test_rows_link.py"]
TESTED_BUGS = [
    (PEER_BUGS, PEER_TESTS),
    (EXPLAIN_BUGS, EXPLAIN_TESTS),
    (ORDER_BUGS, ORDER_TESTS),
    (WRITE_BUGS, WRITE_TESTS),
    (INPUT_BUGS, INPUT_TESTS),
    (END_BUGS, END_TESTS),
    (FLIGHT_BUGS, FLIGHT_TESTS),
    (LOOKAHEAD_BUGS, LOOKAHEAD_TESTS),
    (REQUEST_BUGS, REQUEST_TESTS),
    (LINEAGE_BUGS, LINEAGE_TESTS),
    (RING_BUGS, RING_TESTS),
    (KIND_BUGS, KIND_TESTS),
    (QUEUE_BUGS, QUEUE_TESTS),
    (RARE_BUGS, RARE_TESTS),
]
BUGS += [bug for bugs, _ in TESTED_BUGS for bug in bugs]


def read_texts(tree: Path) -> dict[Path, str]:
    """Return the texts of the package in a tree."""
    files = sorted((tree / "pagepool").rglob("*.p[yx]*"))
    return {file: file.read_text() for file in files if file.suffix in (".py", ".pyx", ".pxd")}


def plant_in(texts: dict[Path, str], bug: Bug, switch: str = "") -> dict[Path, str]:
    """Plant a bug and return the texts that changed. LookupError unless its place occurs exactly once."""
    planted: dict[Path, str] = {}
    for edit in bug.edits:
        old, new = MARKED.sub(r"\1", edit), MARKED.sub(r"\2", edit)
        counts = {file: text.count(old) for file, text in (texts | planted).items()}
        if sum(counts.values()) != 1:
            raise LookupError(f"{bug.name}: its text is {sum(counts.values())} times in the sources, allowed: once")
        [file] = [file for file, count in counts.items() if count]
        planted[file] = (texts | planted)[file].replace(old, new.replace("BUG", switch))
    return planted


def is_of_core(files: Iterable[Path]) -> bool:
    return all("core" in file.parts for file in files)


def plant_all(texts: dict[Path, str]) -> dict[Path, str]:
    """Plant all bugs of the core, each under its number; return the texts that changed."""
    planted: dict[Path, str] = {}
    for number, bug in enumerate(BUGS, 1):
        changed = plant_in(texts | planted, bug, f"(planted_bug() == {number})")
        if is_of_core(changed) and not any("BUG" in edit for edit in bug.edits):
            raise LookupError(f"{bug.name}: in the core, and without a switch it is always on")
        planted |= changed if is_of_core(changed) else {}
    return planted


def plant_core(tree: Path) -> None:
    """Plant all bugs of the core in a copy of the sources."""
    for file, text in plant_all(read_texts(tree)).items():
        file.write_text(FIRST_IMPORT.sub(IMPORT, text, count=1))
    with (tree / PLATFORM).open("a") as platform:
        platform.write(SWITCH)


def copy_tree(tree: Path) -> None:
    """Copy the sources with the core's bugs, to be compiled fast."""
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy(source, tree / name)
    plant_core(tree)
    setup = tree / "setup.py"
    setup.write_text(setup.read_text().replace('"-O3" if name in HOT else "-O1"', '"-O0"'))


def build(tree: Path) -> None:
    """Build the copy, and install it in its folder `built`."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tree / "built"), str(tree)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        sys.exit(f"the copy cannot be built:\n{process.stdout[-2000:]}{process.stderr[-4000:]}")


def simulate(tree: Path, number: int, seconds: float, seed: int) -> tuple[str, float]:
    """Run the simulation; return its failure, empty if it found nothing, and the seconds it took."""
    program = str(ROOT / "tests" / "models" / "contents.py")
    command = [sys.executable, program, "--unchecked", f"--seconds={seconds}", f"--seed={seed}"]
    paths = os.pathsep.join([str(tree / "built"), str(ROOT / "tests" / "models")])
    variables = os.environ | {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1", "PAGEPOOL_PLANTED": str(number)}
    start = time.monotonic()
    try:
        process = subprocess.run(
            command, cwd=tree, env=variables, capture_output=True, text=True, check=False, timeout=seconds + TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return "it never ended", time.monotonic() - start
    taken = time.monotonic() - start
    if process.returncode < 0:
        return f"signal {-process.returncode}", taken
    said = process.stderr.strip().splitlines()
    return said[-1] if process.returncode and said else "", taken


def run_tests(tree: Path, number: int, names: list[str]) -> tuple[str, float]:
    """Run files of tests; return the first test that failed, empty if none did, and the seconds they took."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-qx",
        "-p",
        "no:cacheprovider",
        *(ROOT / "tests" / "core" / name for name in names),
    ]
    variables = os.environ | {"PYTHONPATH": str(tree / "built"), "PYTHONSAFEPATH": "1", "PAGEPOOL_PLANTED": str(number)}
    start = time.monotonic()
    process = subprocess.run(command, cwd=tree, env=variables, capture_output=True, text=True, check=False)
    failed = [line for line in process.stdout.splitlines() if line.startswith("FAILED")]
    found = failed[0] if failed else f"exit code {process.returncode}" if process.returncode else ""
    return found, time.monotonic() - start


def plant(tree: Path, number: int, planted: dict[Path, str], seconds: float, seed: int) -> tuple[str, float]:
    """Test with one bug."""
    tests = [name for bugs, names in TESTED_BUGS for name in names if BUGS[number - 1] in bugs]
    of_facade = {} if is_of_core(planted) else {tree / "built" / file.relative_to(ROOT): file for file in planted}
    for built, source in of_facade.items():
        built.write_text(planted[source])
    try:
        number = 0 if of_facade else number
        found, taken = run_tests(tree, number, tests) if tests else simulate(tree, number, seconds, seed)
        if not found:  # rare in the simulation
            found, more = run_tests(tree, number, ["test_differential.py"])
            taken += more
        return found, taken
    finally:
        for built, source in of_facade.items():
            shutil.copy(source, built)


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="Plant bugs, and see whether tests catch them.")
    parser.add_argument("--tree", type=Path, default=ROOT / ".venv-planted" / "tree", help="where the copy is built")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each bug, at most")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--only", help="bugs whose name has this in it")
    parser.add_argument("--built", action="store_true", help="the copy is there and built")
    return parser.parse_args()


def main() -> None:
    """Plant each bug and print the result; exit with 1 if one was not caught."""
    options = parse_arguments()
    if not options.built:
        copy_tree(options.tree)
        build(options.tree)
    found, _ = simulate(options.tree, 0, options.seconds, options.seed)
    if found:
        sys.exit(f"without any bug: {found}")
    chosen = [(number, bug) for number, bug in enumerate(BUGS, 1) if not options.only or options.only in bug.name]
    print(f"| planted bug | in | caught after | by |\n|---|---|---:|---|\n| none | - | {options.seconds:.0f} s: nothing | - |")
    num_caught = 0
    for number, bug in chosen:
        planted = plant_in(read_texts(ROOT), bug)
        found, taken = plant(options.tree, number, planted, options.seconds, options.seed)
        num_caught += bool(found)
        names = " ".join(file.name for file in planted)
        when = f"{taken:.1f} s" if found else "NOT CAUGHT"
        print(f"| {bug.name} | {names} | {when} | {found[:120].replace('|', '/') or '-'} |", flush=True)
    print(f"{num_caught} of {len(chosen)} caught")
    sys.exit(num_caught < len(chosen))


if __name__ == "__main__":
    main()
