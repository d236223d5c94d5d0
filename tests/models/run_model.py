"""A run: how far a request is, as `pagepool/core/rows/run.pxd` has it. Obviously right, and slow; `run_prefix.py` has groups,
rules and the index.

    0 ...... settled ...... known ...... planned          settled <= known, settled <= planned

A launch writes from its `before` to the next one's, the last to `planned`. `settled` moves up by `_settle` alone, and down by
`_go_back` alone. The number of slots is the length of `held`: they outlive `planned` where drafts are rejected, tokens are cut,
or a prompt is reserved.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from run_prefix import STATE_SLACK, Page, Refused

FREE, PENDING, RUNNING = range(3)


@dataclass(eq=False)
class Launch:
    before: int  # planned when it was launched; what is resolved if this is the oldest
    drafts: int
    samples: bool
    step: object = None
    told: bool = False  # its tokens came by append


@dataclass(eq=False)
class Write:
    end: int
    group: int
    page: Page
    taken: bool = False


class Run:
    def __init__(self, index):
        self.index, self.rules = index, index.rules
        self.clear()

    def clear(self):
        self.tokens, self.settled, self.planned, self.ring, self.state = [], 0, 0, deque(), FREE
        self.held, self.writes, self.boundaries = [[] for _ in self.rules.groups], [], []
        self.hits, self.stay = 0, object()
        self.cached = [0] * len(self.rules.groups)  # leading places that were looked at to be cached

    # derived

    @property
    def known(self):
        return len(self.tokens)

    @property
    def counted(self):  # num_computed_tokens: known tokens that have slots in planned steps
        return self.ring[0].before if self.state == PENDING else min(self.known, self.planned)

    @property
    def ahead(self):  # num_ahead_tokens
        return max(0, self.planned - self.known)

    @property
    def resolved(self):  # leading tokens that no launch in flight computes
        return min(self.ring[0].before if self.ring else self.planned, self.known)

    @property
    def final(self):  # what may be settled now
        n = min(self.counted, self.known - self.rules.hash_lookahead)
        return max(0, n if self.rules.caches == "scheduled" else min(n, self.resolved))

    def filled_by(self, end):  # the step in flight that computes token `end - 1`
        return next((launch.step for launch in reversed(self.ring) if launch.before < end), None)

    def sampling(self):
        return [launch for launch in self.ring if launch.samples and not launch.told]

    def check(self):
        assert (0 <= self.settled <= self.known and self.settled <= self.planned) or self.state == FREE
        assert [launch.before for launch in self.ring] == sorted(launch.before for launch in self.ring)
        assert all(launch.before <= self.planned for launch in self.ring)

    # what is final

    def _settle(self, is_new_step=False):
        """Make final what can be. A plan calls it twice: before it moves `planned` (`is_new_step`), and after. Pages are cached
        both times. Windows leave pages only before: the step that is planned reads what its first token reads.
        """
        self.settled = max(self.settled, self.final)
        for g, group in enumerate(self.rules.groups):
            for i in range(self.cached[g], group.full(self.settled)):
                page, end = self.held[g][i], (i + 1) * group.page_size
                if end + self.rules.hash_lookahead > self.known:  # `settled` may be behind the keys' tokens after a cut
                    break
                if page is not None and page.key is None:
                    self.index.enter(
                        page, g, tuple(self.tokens[: end + self.rules.hash_lookahead]), self.filled_by(end), self.stay
                    )
                self.cached[g] = i + 1
        if is_new_step:
            for g, group in enumerate(self.rules.groups):
                for i in range(min(group.first_read(min(self.final, self.resolved)), len(self.held[g]))):
                    self.index.give_back(self.held[g][i])
                    self.held[g][i] = None

    def _settle_writes(self):
        for write in [w for w in self.writes if w.taken and w.end <= min(self.settled, self.final)]:
            self.writes.remove(write)
            if self.index.find(write.group, self.tokens, write.end) is None:
                key = tuple(self.tokens[: write.end + self.rules.hash_lookahead])
                self.index.enter(write.page, write.group, key, self.filled_by(write.end), self.stay)
            self.index.give_back(write.page)

    # plan

    def _take(self, n):
        for g, group in enumerate(self.rules.groups):
            while len(self.held[g]) < group.pages(n):
                self.held[g].append(self.index.take())

    def plan(self, n=1, drafts=0, step=None):
        """Plan a step: the next n known tokens, or, where none is left, the token in flight and drafts behind it."""
        r = self.rules
        if self.state != RUNNING or n < 0 or drafts < 0:
            raise Refused("not running")
        left = self.known - self.planned
        if left <= 0:
            if not 1 <= len(self.sampling()) <= r.max_steps_ahead or self.planned >= r.max_len:
                raise Refused("no token in flight, too many steps, or full")
        elif not 1 <= n <= left:
            raise Refused("more tokens than known")
        while len(self.ring) > r.max_steps_ahead and self.ring[0] not in self.sampling():
            self._end_launch()
        self._settle(is_new_step=True)
        self._settle_writes()
        self._launch(n if left > 0 else 1, drafts, step)

    def _launch(self, n, drafts, step, elsewhere=False):
        before, end = self.planned, self.planned + n
        is_in_flight = before >= self.known  # the first token, and not a draft, if none is before it
        num_written = end if is_in_flight and not any(launch.drafts for launch in self.sampling()) else min(end, self.known)
        room = min(end + drafts, self.rules.max_len)
        self._take(room)
        samples = end >= self.known and not elsewhere
        self.planned = room if samples else end  # behind a chunk inside the prompt drafts are room alone
        self.ring.append(Launch(before, self.planned - end, samples, step))
        self._plan_writes(before, num_written, not elsewhere)
        if self.rules.caches == "scheduled" and not elsewhere:
            self._settle()

    def _plan_writes(self, before, stop, is_anywhere):
        for end in self.boundaries if self.rules.has_state else ():
            if before < end <= stop and (is_anywhere or end == stop):
                for g, group in enumerate(self.rules.groups):
                    if group.kind == "state" and self.index.find(g, self.tokens, end) is None:
                        self.writes.append(Write(end, g, self.index.take()))

    def take_writes(self):
        due = [write for write in self.writes if not write.taken]
        for write in due:
            write.taken = True
        return due

    # settle

    def settle(self, step, sampled=()):
        """The step has run: it sampled these tokens. Return whether the run got them. Settles earlier chunks too."""
        mine = [launch for launch in self.ring if launch.step is step]
        if not mine:
            return False
        launch, count = mine[-1], len(sampled)
        if count > (launch.drafts + 1 if launch.samples and not launch.told else 0):
            raise Refused("more tokens than it samples")
        if launch.samples and not launch.told:
            if self.sampling()[0] is not launch:
                raise Refused("an earlier step comes first")
            if not count and len(self.sampling()) > 1:
                raise Refused("a later step computes its token")
        while self._end_launch() is not launch:
            pass
        if launch.samples and not launch.told:
            rejected = launch.drafts + 1 - count if count else launch.drafts
            self.planned -= rejected  # positions of later launches were for the longest outcome
            for later in self.ring:
                later.before -= rejected
        self.tokens += sampled
        self._settle()
        self._settle_writes()
        return launch.samples or not launch.told  # False: a cut or a fork took the tokens from it

    def failed(self, step):
        """Launches of a failed step, and those behind it."""
        return [launch for launch in self.ring if launch.step is not None and launch.step >= step]

    def can_go_back(self, first, restart):
        """Whether the run can compute again from `restart` on, since a failed step computed token `first`."""
        lost = any(None in held[group.first_read(restart) :] for group, held in zip(self.rules.groups, self.held, strict=True))
        return self.state == RUNNING and not lost and not (self.rules.has_state and first)

    def has_hit_state(self, keys):
        """Whether the run's state was copied from a checkpoint with one of these keys."""
        key = tuple(self.tokens[: self.hits + self.rules.hash_lookahead])
        return self.hits > 0 and any((g, key) in keys for g, group in enumerate(self.rules.groups) if group.kind == "state")

    def _end_launch(self):
        launch = self.ring.popleft()
        self.index.last_ended = max(self.index.last_ended, launch.step or 0)
        made = self.index.made.get(launch.step, [])
        made[:] = [entry for entry in made if entry[2] is not self.stay]
        return launch

    # tokens from elsewhere

    def commit(self, n, is_last=True, is_failed=False):
        """The first n awaited tokens have arrived; all further ones are computed here if this `is_last`."""
        if self.state != PENDING or not 0 <= n <= self.planned - self.ring[0].before:
            raise Refused("not pending")
        if self.rules.has_state and not is_failed and n < self.planned - self.ring[0].before and is_last:
            raise Refused("a state is the state after all tokens")
        launch = self.ring[0]
        if is_last:
            if is_failed and self.rules.has_state:
                launch.before, n = 0, 0
                self.hits = 0
                self._drop_writes(0)
            self.state, self.planned = RUNNING, launch.before + n
            self.ring.popleft()
        else:
            launch.before += n  # a chunk: the rest is still awaited
        if self.rules.has_state and not is_last:
            return
        end = self.planned if is_last else launch.before
        self.settled = max(self.settled, min(end, self.known - self.rules.hash_lookahead)) if end else 0
        for g, group in enumerate(self.rules.groups):
            for i in range(min(group.first_read(end), len(self.held[g]))):
                self.index.give_back(self.held[g][i])
                self.held[g][i] = None
        self._settle()
        if is_failed:
            for g, group in enumerate(self.rules.groups):
                self._cut_pages(g, group.pages(self.planned))

    # other calls

    def admit(self, tokens, most=None, drafts=0, external=0, resume_at=(), step=None):
        assert self.state == FREE
        hits, junction = self.index.hit(tokens)
        self.tokens, self.planned, self.hits, self.state = list(tokens), hits, hits, RUNNING
        self.settled = hits
        multiple = self.rules.multiple
        ends = {junction, max(0, len(tokens) - STATE_SLACK), *resume_at, *range(0, len(tokens) + 1, self.rules.interval)}
        external = min(external, len(tokens) - 1 - hits)
        ends.add(hits + external if external > 0 else 0)
        self.boundaries = sorted({end // multiple * multiple for end in ends} - {0})
        for g, group in enumerate(self.rules.groups):
            for i in range(group.full(hits)):
                is_read = group.kind == "full" or i >= group.full(hits) - group.run()
                page = self.index.find(g, tokens, (i + 1) * group.page_size) if is_read else None
                self.held[g].append(page)
                if page:
                    page.refs += 1
            self.cached[g] = group.full(hits)
        if external > 0:
            self.state = PENDING
            self._launch(external, 0, None, elsewhere=True)
        else:
            self._launch(min(len(tokens) - hits, most or len(tokens)), drafts, step)
        return hits

    def append(self, token):
        """Tell a token that the host chose. Slots behind the known tokens are not computed ones any more: who accepts drafts
        says so by `settle`.
        """
        if self.known >= self.rules.max_len or len(self.sampling()) > 1:
            raise Refused("full, or a later step computes the token")
        self.planned = min(self.planned, self.known) if self.state == RUNNING else self.planned
        for launch in self.ring:
            launch.before = min(launch.before, self.planned)
        if self.sampling():
            self.sampling()[0].told = True
        self.tokens.append(token)

    def step(self, token, step):
        """Settle the last step with its token, and plan the next one."""
        if self.state != RUNNING or self.known > self.planned:
            raise Refused("known tokens to compute")
        self.append(token)
        while self.ring:
            self._end_launch()
        self.plan(1, 0, step)

    def trim(self, n):
        if self.state != RUNNING or self.ahead or not 0 <= n <= self.known:
            raise Refused("tokens ahead")
        if self.rules.has_state and 0 < n < min(self.known, self.planned):
            raise Refused("a state saw them")
        changed = max(0, n - self.rules.hash_lookahead) if n < self.known else n  # drafters write these slots again
        if changed >= self.counted:
            del self.tokens[n:]
            return
        restart = self._find_restart(min(n, self.counted), changed)
        if self.rules.has_state and 0 < restart < self.counted:
            raise Refused("a state saw tokens of a page that others hold")
        if any(
            None in held[group.first_read(restart) : group.pages(n)]
            for group, held in zip(self.rules.groups, self.held, strict=True)
        ):
            raise Refused("a window has left pages that it needs again")
        self._go_back(restart, n, changed)

    def _kept(self, g, restart, n):
        group, held = self.rules.groups[g], self.held[g]
        for i in range(group.full(restart), min(group.pages(n), len(held))):
            if held[i] is not None and held[i].refs > 1:
                return i
        return group.pages(n)

    def _find_restart(self, most, changed):
        before = None
        while before != most:
            before = most
            for g, group in enumerate(self.rules.groups):
                kept = self._kept(g, min(changed, most), most)
                if kept < group.pages(most):
                    most = kept * group.page_size
        return most

    def foreign(self, most):
        """Return the launches of a run whose tokens are nobody's, after a cut or in a fork: they still say what is not
        resolved, and may fail.
        """
        return deque(Launch(min(launch.before, most), 0, False, launch.step, told=True) for launch in self.ring)

    def _go_back(self, restart, n, changed, is_failed=False):
        """Compute again from `restart` on, with n known tokens, and write to slots from `changed` on. `settled` falls here
        alone.
        """
        changed = min(changed, restart)
        for g, group in enumerate(self.rules.groups):
            keep = self._kept(g, changed, restart if is_failed else n)
            first = group.full(changed)
            for page in self.held[g][first:]:
                if page is not None and page.refs == 1:
                    self.index.drop(page)
            self._cut_pages(g, keep)
            self.cached[g] = min(self.cached[g], first)
        if restart < self.planned:
            self._drop_writes(restart)
            self._forget_launches(restart, is_failed)
        self.settled, self.hits = min(self.settled, restart), min(self.hits, restart)
        del self.tokens[n:]

    def _forget_launches(self, restart, is_failed):
        earlier = [launch for launch in self.ring if launch.before < restart] if is_failed else []
        self.ring = deque(earlier) if is_failed else self.foreign(restart)
        self.planned = restart

    def _cut_pages(self, g, keep):
        while len(self.held[g]) > keep:
            self.index.give_back(self.held[g].pop())
        self.cached[g] = min(self.cached[g], len(self.held[g]))

    def _drop_writes(self, n):
        for write in [w for w in self.writes if w.end > n]:
            self.writes.remove(write)
            self.index.give_back(write.page)

    def fork(self, child):
        if self.state != RUNNING or self.ahead or child.state != FREE:
            raise Refused("tokens ahead")
        child.tokens, child.settled, child.planned = list(self.tokens), self.settled, self.counted
        child.state, child.hits, child.boundaries = RUNNING, self.hits, list(self.boundaries)
        child.ring = self.foreign(self.counted)
        for g, group in enumerate(self.rules.groups):
            shared = group.full(max(0, self.counted - self.rules.hash_lookahead))
            for i, page in enumerate(self.held[g][: group.pages(self.counted)]):
                if page is not None and i < shared and group.kind != "state":
                    page.refs += 1
                child.held[g].append(page if page is None or i < shared else self.index.take())
            child.cached[g] = min(self.cached[g], shared)
        child.settled = min(child.settled, max([0, *(g.full(child.settled) * g.page_size for g in self.rules.groups)]))

    def release(self, was_run=True):
        """End the run. Its launches in flight are nobody's now; if their step fails, `made` says which entries go."""
        if self.state == FREE:
            raise Refused("free")
        if self.state == RUNNING and was_run:
            self._settle()
            self._settle_writes()
        for page in [*(write.page for write in self.writes), *(page for held in self.held for page in held)]:
            self.index.give_back(page)
        self.clear()


def fail(runs, step):
    """A step failed, and with it all later ones. Runs go back to before their first failed launch, and to before the first page
    that another run's failed launch should have filled. Return those that cannot: they are released.
    """
    lost, lost_keys, ended = set(), set(), []
    for number in [number for number in runs[0].index.made if number >= step]:
        for page, key, _ in runs[0].index.made.pop(number):
            if page.key == key:  # else it was cut, or evicted, since
                runs[0].index.drop(page)
                lost.add(page)
            lost_keys.add(key)
    for run in [run for run in runs if run.state != FREE]:
        starts = [launch.before for launch in run.failed(step)[:1]]
        starts += [
            i * group.page_size
            for group, held in zip(run.rules.groups, run.held, strict=True)
            if group.kind != "state"
            for i, page in enumerate(held[: group.full(starts[0])] if starts else held)
            if page in lost
        ]
        if not starts and run.has_hit_state(lost_keys):
            starts = [0]
        if not starts:
            continue
        restart = run._find_restart(min(starts), min(starts))
        if run.can_go_back(min(starts), restart):
            run._go_back(restart, run.known, restart, True)
        else:
            run.release(was_run=False)
            ended.append(run)
    return ended
