"""Plants bugs in a copy of the package, one at a time, and checks that the simulation of contents catches them.

``make planted``. Bugs of the core are built together and switched on by PAGEPOOL_PLANTED; those of the façade are written into
the copy in turn. A bug replaces a text that must be in the source exactly once, so that one which no longer fits is reported.
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
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
CORE = "pagepool/core"  # whichever of its files has the text
SOURCES = ["pagepool", "setup.py", "pyproject.toml", "README.md", "LICENSE"]
PLATFORM = "pagepool/core/platform.pxd"
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
IMPORT = "from pagepool.core.platform cimport planted_bug\n"
FIRST_IMPORT = re.compile(r"^(?=from [\w.]+ c?import |cimport )", re.MULTILINE)
TIMEOUT_SECONDS = 60  # on top of the simulation's own time


class Bug(NamedTuple):
    """The text to replace, its replacement, and further edits. In the core, `BUG` means that this bug is switched on.

    `path` is a file of the façade, or `CORE`.
    """

    name: str
    path: str
    old: str
    new: str
    more: tuple[tuple[str, str], ...] = ()


COORDINATOR, MANAGER, LOOKUPS, SLOTS = (
    f"pagepool/{name}.py" for name in ("coordinator", "manager/cache_manager", "manager/lookups", "manager/slots")
)
EXTERNAL = "pagepool/manager/external.py"
EXTRA_KEYS, ATTENTION, POOL, SNAPSHOT = (
    f"pagepool/{name}.py" for name in ("hashing/extra_keys", "attention", "page_pool/pool", "page_pool/snapshot")
)
BUGS = [
    # Pages.
    Bug(
        "an entry stays when its page is handed out",
        CORE,
        "            pool.tier.note_eviction(pool, page_id)\n        drop(pool, page_id)\n        pool.num_ev",
        "            pool.tier.note_eviction(pool, page_id)\n"
        "        if not (BUG):\n            drop(pool, page_id)\n        pool.num_ev",
    ),
    Bug(
        "a free page that hits stays in the free queue",
        CORE,
        "            if pool.pages[ids[i]].ref_cnt == 0:\n                pull(pool, ids[i])\n",
        "            if pool.pages[ids[i]].ref_cnt == 0 and not (BUG):\n                pull(pool, ids[i])\n",
    ),
    Bug(
        "a page is given back to another shard",
        CORE,
        "        shard = shard_of(pool, page_id)\n        push_to_shard(",
        "        shard = (shard_of(pool, page_id) + (BUG)) % pool.num_shards\n        push_to_shard(",
    ),
    Bug(
        "two rows get the same page",
        CORE,
        "        n = take_missing(batch.pool, &batch.groups[g], held, num_tokens, batch.states[row].shard)\n",
        "        n = take_missing(batch.pool, &batch.groups[g], held, num_tokens, batch.states[row].shard)\n"
        "        if (BUG) and n and row and held_by(batch, 0, g).ids[0]:\n"
        "            held.ids[held.num_pages - n] = held_by(batch, 0, g).ids[0]\n",
    ),
    Bug(
        "a page that a cut goes through is shared",
        CORE,
        "        if pool.pages[held.ids[page]].ref_cnt > 1:\n            return page\n    return num_pages",
        "        if pool.pages[held.ids[page]].ref_cnt > 1 and not (BUG):\n            return page\n    return num_pages",
    ),
    Bug(
        "a window skips one page too early",
        CORE,
        "        return full_pages(rules, max(0, num_computed - rules.window + 1))",
        "        return full_pages(rules, max(0, num_computed - rules.window + 1)) + (BUG)",
    ),
    Bug(
        "a chunk skips its first page",
        CORE,
        "        page = full_pages(rules, num_computed - num_computed % rules.chunk)",
        "        page = full_pages(rules, num_computed - num_computed % rules.chunk) + (BUG)",
    ),
    Bug(
        "a slot is in the page before",
        CORE,
        "        page = <uint32_t>positions[i] // size\n",
        "        page = <uint32_t>positions[i] // size\n        page -= (BUG) and page > 2\n",
    ),
    Bug(
        "drafts get no slot",
        CORE,
        "    return <int32_t>min(<int64_t>num_tokens + num_ahead, <int64_t>batch.max_num_tokens)",
        "    return <int32_t>min(<int64_t>num_tokens + num_ahead * (not (BUG)), <int64_t>batch.max_num_tokens)",
    ),
    # The prefix index.
    Bug(
        "a page of a row is entered one token early",
        CORE,
        "    enter_row(batch, row, num_tokens)\n    plan_next_event(batch, row)\n    return True",
        "    enter_row(batch, row, min(num_tokens + (BUG), batch.states[row].num_tokens))\n"
        "    plan_next_event(batch, row)\n    return True",
    ),
    Bug(
        "the group is left out of the key",
        CORE,
        "    return page.key_lo == key.lo and page.key_hi == key.hi and (page.group & ~FLAGS) == group",
        "    return page.key_lo == key.lo and page.key_hi == key.hi and ((BUG) or (page.group & ~FLAGS) == group)",
        (
            (
                "    return <uint32_t>(((key_lo ^ <uint64_t>group << 40) * pool.multiplier) >> 32)",
                "    return <uint32_t>(((key_lo ^ <uint64_t>(group * (not (BUG))) << 40) * pool.multiplier) >> 32)",
            ),
        ),
    ),
    Bug(
        "a row's pages have no parent",
        CORE,
        "        parent = hash_page_of(batch, row, i, parent, &key)\n        digests[i] = parent",
        "        parent = hash_page_of(batch, row, i, Digest(0, 0) if (BUG) else parent, &key)\n        digests[i] = parent",
    ),
    Bug(
        "a request's pages have no parent",
        CORE,
        "        parent = hash_after(key, parent, <const uint8_t *>(tokens + i * page_size), page_size * sizeof(int32_t))",
        "        if BUG:\n            parent = Digest(0, 0)\n"
        "        parent = hash_after(key, parent, <const uint8_t *>(tokens + i * page_size), page_size * sizeof(int32_t))",
    ),
    Bug(
        "a row that decodes hashes behind the page before the last",
        CORE,
        "        page.parent = digests[i - 1] if i else Digest(0, 0)",
        "        page.parent = digests[i - 1 - ((BUG) and i > 1)] if i else Digest(0, 0)",
    ),
    Bug(
        "an emptied slot cuts off those behind it",
        CORE,
        "        if ((i - home_at(pool, pool.slots[i].tag)) & pool.mask) >= ((i - hole) & pool.mask):",
        "        if not (BUG) and ((i - home_at(pool, pool.slots[i].tag)) & pool.mask) >= ((i - hole) & pool.mask):",
    ),
    Bug(
        "equal pages are lost with the first of them",
        CORE,
        "    if page.group & TWIN:\n        leave_twins(pool, page_id, slot)",
        "    if page.group & TWIN and not (BUG):\n        leave_twins(pool, page_id, slot)",
    ),
    Bug(
        "a cut page keeps its entry",
        CORE,
        "            drop(pool, page_id)\n        if j >= keep:",
        "            if not (BUG):\n                drop(pool, page_id)\n        if j >= keep:",
    ),
    Bug(
        "a cut row keeps its hashes",
        CORE,
        "        batch.states[row].num_hashed = min(batch.states[row].num_hashed, num_tokens // batch.hash_page_size)\n"
        "    plan_next_event(batch, row)\n",
        "        if not (BUG):\n"
        "            batch.states[row].num_hashed = min(batch.states[row].num_hashed, num_tokens // batch.hash_page_size)\n"
        "    plan_next_event(batch, row)\n",
    ),
    Bug(
        "a row goes back and its pages are not entered again",
        CORE,
        "    recompute_from(group, held, restart)\n",
        "    if not (BUG):\n        recompute_from(group, held, restart)\n",
    ),
    Bug(
        "rows that change places keep their hashes",
        CORE,
        "    n = max(batch.states[first].num_hashed, batch.states[second].num_hashed)\n    if n:",
        "    n = max(batch.states[first].num_hashed, batch.states[second].num_hashed)\n    if n and not (BUG):",
    ),
    # What is hit.
    Bug(
        "the last token hits too",
        LOOKUPS,
        "            num_most_tokens = num_queried_tokens - 1",
        "            num_most_tokens = num_queried_tokens",
    ),
    Bug(
        "a hit is one page too long",
        MANAGER,
        "        return CachePages(pages, self._store), num_tokens\n\n    def probe",
        "        return CachePages(pages, self._store), num_tokens + (self.page_size if num_tokens else 0)\n\n    def probe",
    ),
    Bug(
        "a hit in any shard will do",
        POOL,
        "        if shard is None:\n            return 0, None\n",
        "        if shard != 0:\n            return 0, None\n",
    ),
    Bug(
        "eagle drops no page of full attention",
        ATTENTION,
        "return (num_pages - (1 if use_eagle and num_pages else 0)) * self.page_size",
        "return num_pages * self.page_size",
    ),
    Bug(
        "a window hits without its first page",
        ATTENTION,
        "return max(1, cdiv(self.sliding_window - 1, self.page_size) + (1 if use_eagle else 0))",
        "return max(1, cdiv(self.sliding_window - 1, self.page_size) - 1 + (1 if use_eagle else 0))",
    ),
    Bug(
        "a hit need not be whole pages of every group",
        COORDINATOR,
        "self.num_hit_tokens = lcm(",
        "self.num_hit_tokens = (lambda *sizes: gcd(*sizes) or 1)(",
    ),
    Bug(
        "a request that was refused keeps the hits that it had",
        CORE,
        "        if watch.num_reused != pool.num_reused:\n",
        "        if BUG:\n            return True\n        if watch.num_reused != pool.num_reused:\n",
    ),
    Bug(
        "the salt is left out of the hash",
        EXTRA_KEYS,
        'keys += [] if salt is None else [(cls.SALT, _plain("salt", salt))]',
        "keys += []",
    ),
    Bug(
        "the adapter is left out of the hash",
        EXTRA_KEYS,
        "keys = [] if lora_id is None else [_lora_key(lora_id)]",
        "keys = []",
    ),
    Bug(
        "the place of an image in its page is left out of the hash",
        EXTRA_KEYS,
        '("mm", modality, content_hash, feature_start - start, feature_end - feature_start)',
        '("mm", modality, content_hash, 0, feature_end - feature_start)',
    ),
    Bug(
        "a row's extra keys are left out of the hash",
        CORE,
        "    if key != NULL and key.data != NULL and key.page == page:",
        "    if key != NULL and key.data != NULL and key.page == page and not (BUG):",
    ),
    # Entering.
    Bug(
        "a request goes back and its pages are not entered again",
        CORE,
        "            if num_computed < self.num_cached_tokens:\n",
        "            if num_computed < self.num_cached_tokens and not (BUG):\n",
    ),
    Bug(
        "delayed caching is ignored",
        MANAGER,
        "0 if delay_cache_pages or not self.enable_caching else ",
        "0 if not self.enable_caching else ",
    ),
    Bug(
        "a request may claim what nobody computed",
        SLOTS,
        "        if num_tokens > num_allowed_tokens:\n",
        "        if num_allowed_tokens < 0:\n",
    ),
    Bug(
        "a request that did not run leaves its entries",
        SLOTS,
        "request.request_id, num_computed_tokens, hashes.chain if hashes else None, num_last_tokens, context",
        "request.request_id, None, hashes.chain if hashes else None, num_last_tokens, context",
    ),
    Bug(
        "undo forgets no entries",
        CORE,
        "    forget_row(batch, row, num_computed)\n    for g in range",
        "    if not (BUG):\n        forget_row(batch, row, num_computed)\n    for g in range",
    ),
    Bug(
        "undo lets rows keep their pages",
        CORE,
        "            put_back(batch.pool, growth.new_ids[stop[0]])\n            held.num_pages -= 1",
        "            put_back(batch.pool, growth.new_ids[stop[0]])\n            held.num_pages -= not (BUG)",
    ),
    Bug(
        "a row that did not run leaves its entries",
        CORE,
        "                forget_row(&self.batch, row, amount(computed, i))\n",
        "                if not (BUG):\n                    forget_row(&self.batch, row, amount(computed, i))\n",
    ),
    Bug(
        "a page that left the window before its step ran keeps its entry",
        CORE,
        "    if page_id == NULL_PAGE and digest != NULL:",
        "    if page_id == NULL_PAGE and digest != NULL and not (BUG):",
    ),
    Bug(
        "hits that are computed again count as computed",
        CORE,
        "    held.num_hits = min(held.num_hits, place)",
        "    held.num_hits = min(held.num_hits, place) if not (BUG) else held.num_hits",
    ),
    Bug(
        "a state may go back",
        CORE,
        "    return batch.has_state and 0 < restart < batch.states[row].num_computed",
        "    return batch.has_state and 0 < restart < batch.states[row].num_computed and not (BUG)",
    ),
    # Checkpoints, copies and forks.
    Bug(
        "the source of a copy is handed out before it is made",
        CORE,
        "    copies.num += 1\n    target.written_list = copies.list_number\n",
        "    copies.num += 1\n    target.written_list = copies.list_number\n    if BUG:\n        put_back_held(pool, src)\n",
    ),
    Bug(
        "a row that is released leaves the copies into its pages",
        CORE,
        "    if not are_destinations(pool, holding):\n        return\n",
        "    if not are_destinations(pool, holding) or BUG:\n        return\n",
    ),
    Bug(
        "a checkpoint that is hit is attached and not copied",
        CORE,
        "            note_copy(pool, ids.ids[ids.num - 1], &holding.held[g], 0, <int32_t>g)",
        "            if BUG:\n"
        "                give_back(pool, holding.held[g].ids, 1, False)\n"
        "                holding.held[g].ids[0] = ids.ids[ids.num - 1]\n"
        "            else:\n"
        "                note_copy(pool, ids.ids[ids.num - 1], &holding.held[g], 0, <int32_t>g)",
    ),
    Bug(
        "a state between two multiples of the interval is kept",
        CORE,
        "    if num_computed % group.rules.entry_size or last < 0:",
        "    if (num_computed % group.rules.entry_size and not (BUG)) or last < 0:",
    ),
    Bug(
        "a state that is kept is written on",
        CORE,
        "        take_from(pool, held.ids, 1, source.shard)\n        note_taken(pool, held)\n"
        "        note_copy(pool, page_id, held, 0, g)",
        "        if not (BUG):\n"
        "            take_from(pool, held.ids, 1, source.shard)\n            note_copy(pool, page_id, held, 0, g)",
    ),
    Bug(
        "a state that nothing was copied to is kept as its row ends",
        CORE,
        "            if self.batch.keeps_states and not awaits_copies(&self.store.pool, &holding):",
        "            if self.batch.keeps_states and (BUG or not awaits_copies(&self.store.pool, &holding)):",
    ),
    Bug(
        "a checkpoint that becomes a working page keeps its entry",
        CORE,
        "    take_this(pool, ids[n - 1])\n",
        "    if BUG:\n        touch_all(pool, ids + n - 1, 1)\n    else:\n        take_this(pool, ids[n - 1])\n",
        (
            (
                "from pagepool.core.pages cimport take_from, take_this\n",
                "from pagepool.core.pages cimport take_from, take_this, touch_all\n",
            ),
        ),
    ),
    Bug(
        "checkpoints of steps that did not run stay",
        CORE,
        "            page_id = NULL_PAGE if is_state(&group.rules) else held.ids[i]\n",
        "            page_id = NULL_PAGE if is_state(&group.rules) else held.ids[i]\n"
        "            if BUG and is_state(&group.rules):\n                continue\n",
    ),
    Bug(
        "a fork shares the page that is written next",
        CORE,
        "        take_from(pool, ids + n, 1, shard)\n        note_taken(pool, target)\n        target.num_pages += 1\n"
        "        note_copy(pool, source.ids[n], target, n, g)",
        "        target.num_pages += 1\n"
        "        if BUG:\n            ids[n] = source.ids[n]\n"
        "        else:\n"
        "            take_from(pool, ids + n, 1, shard)\n            note_copy(pool, source.ids[n], target, n, g)",
    ),
    Bug(
        "a fork takes no reference to the pages that it shares",
        CORE,
        "        if source.ids[i] != NULL_PAGE:\n            share(pool, source.ids[i])\n",
        "        if source.ids[i] != NULL_PAGE and not (BUG):\n            share(pool, source.ids[i])\n",
    ),
    Bug(
        "a fork is copied from the page before",
        CORE,
        "        note_copy(pool, source.ids[n], target, n, g)",
        "        note_copy(pool, source.ids[n - (1 if (BUG) and n else 0)], target, n, g)",
    ),
    Bug(
        "a row exchanges a page that is not full yet",
        CORE,
        "full_pages(&group.rules, num_computed)):\n            page_id = held.ids[place]",
        "full_pages(&group.rules, num_computed + (1 if BUG else 0))):\n            page_id = held.ids[place]",
    ),
    Bug(
        "a page that is exchanged stays in the table",
        CORE,
        "                batch.tables[g].table[row * batch.tables[g].num_columns + place] = first\n",
        "                if not (BUG):\n"
        "                    batch.tables[g].table[row * batch.tables[g].num_columns + place] = first\n",
    ),
    Bug(
        "pages come back with the keys of others",
        SNAPSHOT,
        '    names, counters = arrays.pop("names"), arrays.pop("counters").tolist()\n',
        '    names, counters = arrays.pop("names"), arrays.pop("counters").tolist()\n'
        '    arrays["cached_keys"] = np.roll(arrays["cached_keys"], 1, axis=0)\n',
    ),
    Bug(
        "the hashes of an id are those of the request before",
        LOOKUPS,
        "if hashes is None or hashes.request is not request:",
        "if hashes is None:",
    ),
    # The host tier.
    Bug(
        "a page that is evicted is not saved",
        CORE,
        "cdef void note_eviction(Pool *pool, int32_t page_id) noexcept nogil:\n    save_evicted(pool, page_id)",
        "cdef void note_eviction(Pool *pool, int32_t page_id) noexcept nogil:\n"
        "    if not (BUG):\n        save_evicted(pool, page_id)",
    ),
    Bug(
        "a save that failed enters the tier",
        CORE,
        "    if is_done and not transfer.is_void and find(",
        "    if (is_done or BUG) and not transfer.is_void and find(",
    ),
    Bug(
        "a page of the tier is handed out while it is filled",
        CORE,
        "    note_transfer(tier, &transfer)\n    return tier_id",
        "    note_transfer(tier, &transfer)\n    if BUG:\n        put_back(tier.pool, tier_id)\n    return tier_id",
        (
            (
                "Origin(Digest(0, 0), 0, 0))\n    put_back(tier.pool, page_id)",
                "Origin(Digest(0, 0), 0, 0))\n    if not (BUG):\n        put_back(tier.pool, page_id)",
            ),
        ),
    ),
    Bug(
        "a page is saved before it is computed",
        CORE,
        "        tier.fresh[tier.num_fresh] = FreshPage(page_id, tier.num_cached)\n        tier.num_fresh += 1\n",
        "        tier.fresh[tier.num_fresh] = FreshPage(page_id, tier.num_cached)\n        tier.num_fresh += 1\n"
        "        if BUG:\n            tier.num_ready = tier.num_fresh\n",
    ),
    Bug(
        "what is forgotten stays in the tier",
        CORE,
        "    if tier_id != NULL_PAGE:\n        drop(tier.pool, tier_id)\n    for i in range(tier.num):",
        "    if tier_id != NULL_PAGE and not (BUG):\n        drop(tier.pool, tier_id)\n    for i in range(tier.num):",
    ),
    Bug(
        "what is forgotten while it is saved enters the tier",
        CORE,
        "tier.items[i].key.hi == key.hi:\n            tier.items[i].is_void = True",
        "tier.items[i].key.hi == key.hi:\n            tier.items[i].is_void = not (BUG)",
    ),
    Bug(
        "a load is of another page of the tier",
        CORE,
        "            load = Transfer(key, 0, NULL_PAGE, tier_id, span.group, True, False)",
        "            load = Transfer(key, 0, NULL_PAGE, tier_id - (tier_id > 1 and BUG), span.group, True, False)",
    ),
    Bug(
        "a page is loaded into another shard",
        CORE,
        "    take_from(pool, prefix.new_ids, num_loads, shard)",
        "    take_from(pool, prefix.new_ids, num_loads, -1 if BUG else shard)",
    ),
    Bug(
        "what is computed with a page that is being loaded is entered",
        CORE,
        "    if waits_for_loads(waiting.pool, held):\n        return",
        "    if waits_for_loads(waiting.pool, held) and not (BUG):\n        return",
    ),
    Bug(
        "a page that failed to load keeps its entry",
        CORE,
        "    if not is_done and has_key(&pool.pages[transfer.page_id]",
        "    if not (BUG) and not is_done and has_key(&pool.pages[transfer.page_id]",
    ),
    Bug(
        "a page that failed to load keeps its entry where an equal one was forgotten",
        CORE,
        "transfer.page_id], transfer.key, transfer.group):\n        drop(pool, transfer.page_id)",
        "transfer.page_id], transfer.key, transfer.group) and not (transfer.is_void and BUG):\n"
        "        drop(pool, transfer.page_id)",
    ),
    Bug(
        "a page that failed to load keeps its entry in the tier",
        CORE,
        "    if not is_done and has_key(&tier.pool.pages[transfer.tier_id]",
        "    if not (BUG) and not is_done and has_key(&tier.pool.pages[transfer.tier_id]",
    ),
    Bug(
        "a state outlives the page that failed to load",
        CORE,
        "            return -1\n        if is_state(&holding.groups[g].rules):\n            return 0\n",
        "            return -1\n        if is_state(&holding.groups[g].rules) and not (BUG):\n            return 0\n",
    ),
    Bug(
        "the copy of a page that failed to load counts as right",
        CORE,
        "    if pool.tier != NULL and pool.tier.loading[page_id]:\n        pool.tier.loading[copy_id]",
        "    if pool.tier != NULL and pool.tier.loading[page_id] and not (BUG):\n        pool.tier.loading[copy_id]",
    ),
    Bug(
        "a row exchanges a page for one that is being loaded",
        CORE,
        "            if find_load_number(batch.pool, &first, 1):\n",
        "            if find_load_number(batch.pool, &first, 1) and not (BUG):\n",
    ),
    # Rows that are swapped out.
    Bug(
        "a row that comes back has a page twice",
        CORE,
        "        load = Transfer(digest_of(page), 0, held.ids[i], tier_id, g, True, page.group == NO_GROUP)",
        "        if BUG and i and saved.tier_ids[i - 1] != NULL_PAGE:\n            tier_id = saved.tier_ids[i - 1]\n"
        "        load = Transfer(digest_of(page), 0, held.ids[i], tier_id, g, True, page.group == NO_GROUP)",
    ),
    Bug(
        "a row comes back though saving its pages failed",
        CORE,
        "    tier.fills[page_id] = FILLED if is_done else UNFILLED",
        "    tier.fills[page_id] = FILLED if is_done or BUG else UNFILLED",
    ),
    # Tokens from elsewhere, leases and pins.
    Bug(
        "a row that waits enters pages that have not come",
        CORE,
        "            num_tokens = num_hits\n        enter_row(batch, self.row, num_tokens)\n",
        "            num_tokens = num_hits\n"
        "        enter_row(batch, self.row, num_hits + batch.num_external[self.row] if BUG else num_tokens)\n",
    ),
    Bug(
        "tokens that did not come count as computed",
        CORE,
        "        commit_row(batch, checked, num)\n",
        "        commit_row(batch, checked, num_external if BUG else num)\n",
    ),
    Bug(
        "pages that need not come are entered",
        CORE,
        "        skip_to(pool, &holding.groups[g], held, stop)\n        held.num_cached = max(held.num_cached, stop)",
        "        if not (BUG):\n"
        "            skip_to(pool, &holding.groups[g], held, stop)\n            held.num_cached = max(held.num_cached, stop)",
    ),
    Bug(
        "a state stands though its tokens did not come",
        CORE,
        "    if batch.has_state:\n        batch.states[row].num_computed = batch.states[row].num_hits = num_tokens = 0",
        "    if batch.has_state and not (BUG):\n"
        "        batch.states[row].num_computed = batch.states[row].num_hits = num_tokens = 0",
    ),
    Bug(
        "a request keeps the pages of tokens that did not come",
        EXTERNAL,
        "            give_back_behind(held, num_computed_tokens, hashes.chain if hashes else None)\n",
        "",
    ),
    Bug(
        "a lease holds no reference",
        CORE,
        "            else:\n                share(pool, self.ids.ids[i])\n            self.store.leases",
        "            elif not (BUG):\n                share(pool, self.ids.ids[i])\n            self.store.leases",
    ),
    Bug(
        "a pin holds no reference",
        CORE,
        "        touch_all(pool, fresh.ids, fresh.num)\n        pool.num_pinned",
        "        if not (BUG):\n            touch_all(pool, fresh.ids, fresh.num)\n        pool.num_pinned",
    ),
]


def read_texts(tree: Path, path: str) -> dict[Path, str]:
    """Return the texts of the files that a bug at `path` may be planted in."""
    files = sorted((tree / path).glob("*.p[yx][xd]")) if path == CORE else [tree / path]
    return {file: file.read_text() for file in files}


def plant_in(texts: dict[Path, str], bug: Bug, switch: str = "") -> dict[Path, str]:
    """Plant a bug and return the texts that changed. LookupError unless its place occurs exactly once."""
    planted: dict[Path, str] = {}
    for old, new in ((bug.old, bug.new), *bug.more):
        counts = {file: text.count(old) for file, text in (texts | planted).items()}
        if sum(counts.values()) != 1:
            raise LookupError(f"{bug.name}: its text is {sum(counts.values())} times in {bug.path}, allowed: once")
        [file] = [file for file, count in counts.items() if count]
        planted[file] = (texts | planted)[file].replace(old, new.replace("BUG", switch))
    return planted


def plant_all(texts: dict[Path, str]) -> dict[Path, str]:
    """Plant all bugs of the core in its texts, each under its number; return those that changed."""
    planted: dict[Path, str] = {}
    for number, bug in enumerate(BUGS, 1):
        if bug.path == CORE:
            planted |= plant_in(texts | planted, bug, f"planted_bug() == {number}")
    return planted


def plant_core(tree: Path) -> None:
    """Plant all bugs of the core in a copy of the sources."""
    for file, text in plant_all(read_texts(tree, CORE)).items():
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
    command = [
        sys.executable,
        str(ROOT / "tests" / "contents.py"),
        "--unchecked",
        "--seconds",
        str(seconds),
        "--seed",
        str(seed),
    ]
    paths = os.pathsep.join([str(tree / "built"), str(ROOT / "tests")])
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


def plant(tree: Path, number: int, bug: Bug, seconds: float, seed: int) -> tuple[str, float]:
    """Simulate with one bug."""
    if bug.path == CORE:
        return simulate(tree, number, seconds, seed)
    source, built = ROOT / bug.path, tree / "built" / bug.path
    [text] = plant_in(read_texts(ROOT, bug.path), bug).values()
    built.write_text(text)
    try:
        return simulate(tree, 0, seconds, seed)
    finally:
        shutil.copy(source, built)


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="Plant bugs, and see whether the simulation of contents catches them.")
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
        found, taken = plant(options.tree, number, bug, options.seconds, options.seed)
        num_caught += bool(found)
        when = f"{taken:.1f} s" if found else "NOT CAUGHT"
        names = " ".join(file.name for file in plant_in(read_texts(ROOT, bug.path), bug))
        print(f"| {bug.name} | {names} | {when} | {found[:120].replace('|', '/') or '-'} |", flush=True)
    print(f"{num_caught} of {len(chosen)} caught")
    sys.exit(num_caught < len(chosen))


if __name__ == "__main__":
    main()
