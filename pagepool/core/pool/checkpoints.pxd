# Checkpoints of a bank of states, and how soon each is evicted.
#
# A chat leaves a checkpoint at each of its prompts, and goes on from the last one alone. So checkpoints have classes. Of the
# oldest checkpoints of all classes, the one is evicted that has waited longest for the density of its class: the tokens that
# hits of the class saved, for each checkpoint and tick. A tick is a checkpoint that is cached or hit. Hits that evictions lost
# count as well, so a class whose checkpoints are evicted too early learns it.
#
# A `Lineage` belongs to a request or row, a run: it has the checkpoint from which the run continues, or the last that it made.
#
# Always: `ClassCounts.num` is the number of cached checkpoints of the class, and a page without an entry is in no class.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset

cdef enum:                    # classes, in the order of their parts of the queue
    RECENT                    # cached or hit last: the next prompt may continue from it
    LEFT                      # runs went on from it, or past it, and nobody came back since
    LONE                      # at a place where keys and values ended though no prompts parted there
    OF_ANSWER                 # at the end of an answer, not hit yet
    OUTDONE                   # at the end of a prompt whose answer has a checkpoint
    NUM_CHECKPOINT_CLASSES
    NO_CLASS = 7              # in a ghost: the loss was counted

cdef enum:                    # bits of `Boundary` kinds: why a state is kept
    AT_PROMPT_END = 1
    AT_JUNCTION = 2           # where prompts part, or where the engine says so
    AT_ANSWER_END = 4
    AT_LONE_PLACE = 8

cdef enum:
    PRIOR_DIVISOR = 100       # a class counts as if it had been there for a hundredth of (checkpoints x checkpoints) ticks
    HALVED_AFTER = 16         # counts are halved after this many ticks for each checkpoint
    ANSWERS_HALVED_AFTER = 4  # gains of answers are halved after this many requests for each checkpoint
    MAX_CONTINUED = 2

cdef struct CheckpointNote:   # a cached checkpoint
    int64_t stamp             # tick at which it was cached, hit or left
    uint64_t prev_key         # lower half of the digest of the checkpoint before it
    int32_t prev              # page of the checkpoint before it in its run, valid while that page has this key
    int32_t prev_tokens       # leading tokens of that checkpoint; 0: there was none
    int32_t num_tokens        # leading tokens that the state has seen; 0: not known, until it is hit
    uint8_t number            # its class
    uint8_t kind              # bits
    uint8_t num_continued     # runs that continued from it or past it, up to MAX_CONTINUED

cdef struct ClassCounts:
    int64_t num               # cached checkpoints
    int64_t since             # tick up to which `residency` counts
    double residency          # ticks that checkpoints of the class were cached
    double num_hit_tokens     # tokens that hits of the class saved, and that evictions lost

cdef struct Answers:          # whether states at the ends of answers pay
    double num_gained         # tokens that they saved, or would have saved
    double num_spared         # tokens that checkpoints at the ends of prompts saved, or would have saved
    int64_t num_requests      # admitted since both were halved

cdef struct Checkpoints:      # those of one bank
    CheckpointNote *notes     # [pages of the bank]
    int32_t start             # first page
    int64_t now               # ticks
    int64_t halved_at         # tick
    uint32_t num_evicted      # wraps around
    ClassCounts[NUM_CHECKPOINT_CLASSES] classes
    Answers answers

cdef struct Lineage:              # checkpoints of a request or row in one group of states
    uint64_t last_key         # lower half of the digest of the checkpoint hit or made last
    int32_t last              # its page, valid while that has the key; 0: none
    int32_t last_tokens
    bint is_source            # it was hit: the run continues from it, and has made none

cdef struct NewCheckpoint:    # a checkpoint that is being cached
    const Lineage *lineage            # the run that made it
    int32_t num_tokens
    uint8_t kind
    bint is_replacing         # it takes the place of the run's last one, and is no tick


cdef inline CheckpointNote *note_of(const Checkpoints *checkpoints, int32_t page_id) noexcept nogil:
    return &checkpoints.notes[page_id - checkpoints.start]


cdef inline int64_t count_checkpoints(const Checkpoints *checkpoints) noexcept nogil:
    cdef int64_t count = 0
    cdef Py_ssize_t i
    for i in range(NUM_CHECKPOINT_CLASSES):
        count += checkpoints.classes[i].num
    return count


cdef inline void count_residency(Checkpoints *checkpoints, Py_ssize_t number) noexcept nogil:
    """Bring the residency of a class up to date, before its number of checkpoints changes."""
    cdef ClassCounts *counts = &checkpoints.classes[number]
    counts.residency += <double>counts.num * <double>(checkpoints.now - counts.since)
    counts.since = checkpoints.now


cdef inline void change_class(Checkpoints *checkpoints, Py_ssize_t number, int32_t change) noexcept nogil:
    """Count a checkpoint that enters a class or, with a change of -1, leaves it."""
    count_residency(checkpoints, number)
    checkpoints.classes[number].num += change
    assert checkpoints.classes[number].num >= 0


cdef inline int64_t tick(Checkpoints *checkpoints) noexcept nogil:
    """Count a checkpoint that is cached or hit, and return its stamp."""
    cdef Py_ssize_t i
    checkpoints.now += 1
    if checkpoints.now - checkpoints.halved_at >= HALVED_AFTER * max(<int64_t>1, count_checkpoints(checkpoints)):
        checkpoints.halved_at = checkpoints.now
        for i in range(NUM_CHECKPOINT_CLASSES):
            count_residency(checkpoints, i)
            checkpoints.classes[i].residency /= 2
            checkpoints.classes[i].num_hit_tokens /= 2
    return checkpoints.now


cdef inline uint8_t first_class(uint8_t kind) noexcept nogil:
    if kind == AT_LONE_PLACE:
        return LONE
    return OF_ANSWER if kind == AT_ANSWER_END else <uint8_t>RECENT


cdef inline void begin_note(Checkpoints *checkpoints, int32_t page_id, const NewCheckpoint *new) noexcept nogil:
    """Note a checkpoint that is being cached; NULL: nothing is known of it, since it was loaded or cached by hand."""
    cdef CheckpointNote *note = note_of(checkpoints, page_id)
    memset(note, 0, sizeof(CheckpointNote))
    if new != NULL:
        if new.lineage.last_tokens < new.num_tokens:  # else the run was set back
            note.prev, note.prev_key, note.prev_tokens = new.lineage.last, new.lineage.last_key, new.lineage.last_tokens
        note.num_tokens, note.kind, note.number = new.num_tokens, new.kind, first_class(new.kind)
    note.stamp = checkpoints.now if new != NULL and new.is_replacing else tick(checkpoints)
    change_class(checkpoints, note.number, 1)


cdef inline void end_note(Checkpoints *checkpoints, int32_t page_id) noexcept nogil:
    """Forget a checkpoint that loses its entry."""
    change_class(checkpoints, note_of(checkpoints, page_id).number, -1)


cdef inline double _density_of_all(Checkpoints *checkpoints) noexcept nogil:
    """Compute the hit tokens for each checkpoint and tick, of all classes but LEFT."""
    cdef double num_hit_tokens = 0, residency = 0
    cdef Py_ssize_t i
    for i in range(NUM_CHECKPOINT_CLASSES):
        if i != LEFT:
            count_residency(checkpoints, i)
            num_hit_tokens += checkpoints.classes[i].num_hit_tokens
            residency += checkpoints.classes[i].residency
    return (num_hit_tokens + 1e-9) / (residency + 1e-9)


cdef inline double density_of(Checkpoints *checkpoints, Py_ssize_t number) noexcept nogil:
    """Compute the hit tokens for each checkpoint and tick of a class. Recent checkpoints and those of answers count as the
    others do until they are known better; the other classes, as if nothing hit them.
    """
    cdef double size = <double>count_checkpoints(checkpoints)
    cdef double weight = max(1.0, size * size / PRIOR_DIVISOR)
    cdef double prior = _density_of_all(checkpoints) if number == RECENT or number == OF_ANSWER else 0
    count_residency(checkpoints, number)
    return (checkpoints.classes[number].num_hit_tokens + weight * prior) / (checkpoints.classes[number].residency + weight)


cdef inline double waiting_of(Checkpoints *checkpoints, Py_ssize_t number, int64_t stamp) noexcept nogil:
    """Return how long a checkpoint of a class has waited, for each hit token that its class promises."""
    return (<double>(checkpoints.now - stamp) + 0.5) / (density_of(checkpoints, number) + 1e-12)


# Ghosts. The mark of an evicted checkpoint has a bit for a loss of keys and values, its class, whether it was at the end of a
# prompt, and the number of its eviction.

cdef enum:
    CLASS_SHIFT = 1           # above `EVICTED` and `DROPPED`
    CLASS_MASK = 7
    PROMPT_END_SHIFT = 4
    EVICTION_SHIFT = 5
    EVICTION_MASK = (1 << 27) - 1


cdef inline uint32_t ghost_mark(const Checkpoints *checkpoints, const CheckpointNote *note) noexcept nogil:
    """Return the mark of a checkpoint that is evicted now."""
    cdef uint32_t mark = <uint32_t>note.number << CLASS_SHIFT
    mark |= <uint32_t>(note.kind & AT_PROMPT_END != 0) << PROMPT_END_SHIFT
    return mark | (checkpoints.num_evicted & EVICTION_MASK) << EVICTION_SHIFT


cdef inline bint is_recent_ghost(const Checkpoints *checkpoints, uint32_t mark) noexcept nogil:
    """Whether an evicted checkpoint is among those evicted last, as many as the bank has checkpoints."""
    cdef uint32_t age = (checkpoints.num_evicted - (mark >> EVICTION_SHIFT)) & EVICTION_MASK
    return <int64_t>age <= count_checkpoints(checkpoints)


cdef inline bint writes_answers(const Checkpoints *checkpoints) noexcept nogil:
    """Whether states at the ends of answers have been measured to save more tokens than those at the ends of prompts."""
    return checkpoints.answers.num_gained > checkpoints.answers.num_spared + 1


cdef inline void count_answers(Checkpoints *checkpoints, double num_gained, double num_spared) noexcept nogil:
    """Count an admitted request, and the tokens that it speaks for states at the ends of answers, or against them."""
    cdef Answers *answers = &checkpoints.answers
    answers.num_requests += 1
    if answers.num_requests >= ANSWERS_HALVED_AFTER * max(<int64_t>1, count_checkpoints(checkpoints)):
        answers.num_requests = 0
        answers.num_gained /= 2
        answers.num_spared /= 2
    answers.num_gained += num_gained
    answers.num_spared += num_spared
