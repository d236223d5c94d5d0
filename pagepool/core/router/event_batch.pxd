# Batches of cache events, read from the msgpack of a worker's messages.
#
# A batch is ``[ts, events, rank]`` or a map with these names. An event is a map with ``type``, or an array that begins with it.
# Payloads are not trusted: each length is compared with the remaining bytes before memory is reserved, there is no recursion,
# and each step consumes a byte. An event that is valid msgpack never fails the batch: if its fields are not what the index
# needs, the event is left out. Always:
#
# * A `Reader` is at or before its end. After an error its values are meaningless, and callers stop.
# * The hashes of an event lie within those of its batch. Events before `num_void` are void.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from pagepool.core.base cimport rare, raw_free, reserve_items

cdef enum:
    MAX_EVENT_GROUPS = 64
    MAX_BLOCK_SIZE = 1 << 30  # tokens per block or window

cdef enum EventKind:
    NO_EVENT
    STORED
    REMOVED
    CLEARED
    LEFT_OUT                  # a stored event for which the index has no place

cdef enum Field:
    TYPE
    HASHES
    PARENT
    TOKENS
    BLOCK_SIZE
    MEDIUM
    GROUP
    SPEC_KIND
    WINDOW
    NUM_GROUPS
    HIT_TOKENS
    EVENTS
    OTHER

cdef struct Reader:
    const uint8_t *at
    const uint8_t *end
    const char *error         # NULL: none

cdef struct Text:             # some bytes of a payload; `at` NULL: None
    const uint8_t *at
    Py_ssize_t size

cdef struct Spec:             # properties of a cache group, from a BlockStored event
    int32_t block_size        # tokens; 0: unknown
    int32_t window            # tokens; 0: none
    bint is_state

cdef struct GroupSpec:        # description of a group by events
    Spec spec                 # block_size 0: unknown
    bint has_kind             # whether an event said the kind
    bint has_tails            # whether there are shorter blocks: each is the part of a block that a prompt fills
    int32_t trust             # in the events that gave the spec: see `_trust_of`

cdef struct Told:             # numbers in pagepool's events that concern all groups; 0: unknown
    int32_t num_groups
    int32_t hit_tokens        # hits are multiples of this many tokens

cdef struct Event:
    EventKind kind
    int32_t group
    Told told
    Spec spec
    bint has_kind             # whether the event says the kind of its group
    bint is_misfit            # a field has a value that the index cannot use
    bint is_nowhere           # the group or medium cannot be read
    Text medium
    int32_t plane             # number of the medium in the index, set when the batch is applied; -1: none
    Py_ssize_t first          # index of the first hash in the batch
    Py_ssize_t num            # hashes
    uint64_t parent
    bint has_parent
    bint has_hashes

cdef struct EventBatch:
    Event *events
    Py_ssize_t num_events
    Py_ssize_t capacity
    uint64_t *hashes
    Py_ssize_t num_hashes
    Py_ssize_t hash_capacity
    Py_ssize_t num_stored     # hashes of stored events
    bint is_cleared
    Told told                 # set by `settle_groups`, as are the specs
    GroupSpec[MAX_EVENT_GROUPS] specs
    Py_ssize_t num_void       # leading events that a later one clears; only their groups count
    int64_t num_skipped       # events left out, wholly or in part

cdef extern from *:
    """
    static const char pagepool_no_memory[] = "memory is short";
    """
    const char *NO_MEMORY "pagepool_no_memory"


cdef inline void _fail(Reader *reader, const char *error) noexcept nogil:
    if reader.error == NULL:
        reader.error = error


cdef inline uint64_t _read_number(Reader *reader, int size) noexcept nogil:
    """Read a big-endian number; 0 if the payload ends within it."""
    cdef uint64_t number = 0
    cdef int i
    assert 0 < size <= 8 and reader.at <= reader.end
    if rare(reader.end - reader.at < size):
        _fail(reader, "the payload ends within a value")
        return 0
    for i in range(size):
        number = number << 8 | reader.at[i]
    reader.at += size
    return number


cdef inline uint8_t _read_byte(Reader *reader) noexcept nogil:
    return <uint8_t>_read_number(reader, 1)


cdef inline void _skip_bytes(Reader *reader, uint64_t size) noexcept nogil:
    if rare(size > <uint64_t>(reader.end - reader.at)):
        _fail(reader, "the payload ends within a value")
        return
    reader.at += size


cdef inline bint _is_none(Reader *reader) noexcept nogil:
    """Read the next value if it is None, and return whether it was."""
    cdef bint found = reader.at < reader.end and reader.at[0] == 0xc0
    reader.at += found
    return found


cdef inline Py_ssize_t _read_count(Reader *reader, uint8_t few, uint8_t few_mask, uint8_t code) noexcept nogil:
    """Read the header of an array or map. Its short form is `few` and a count, its long forms are `code` and ``code + 1``."""
    cdef uint8_t first = _read_byte(reader)
    cdef uint64_t num = 0
    if (first & <uint8_t>~few_mask) == few:
        num = first & few_mask
    elif first == code or first == code + 1:
        num = _read_number(reader, 2 if first == code else 4)
    else:
        _fail(reader, "got another type, allowed: an array or a map")
    if num > <uint64_t>(reader.end - reader.at):  # each item takes a byte or more
        _fail(reader, "an array or a map is longer than the payload")
    return 0 if reader.error != NULL else <Py_ssize_t>num


cdef inline Py_ssize_t _read_array(Reader *reader) noexcept nogil:
    return _read_count(reader, 0x90, 0x0f, 0xdc)


cdef inline Py_ssize_t _read_map(Reader *reader) noexcept nogil:
    return _read_count(reader, 0x80, 0x0f, 0xde)


cdef inline bint _is_map(const Reader *reader) noexcept nogil:
    return reader.at < reader.end and ((reader.at[0] & 0xf0) == 0x80 or reader.at[0] in (0xde, 0xdf))


cdef inline const uint8_t *_pass_ints(const uint8_t *at, const uint8_t *end, Py_ssize_t *num) noexcept nogil:
    """Skip up to `num` token ids, unsigned ints of up to 32 bits. Stop at any other value, and near the end."""
    cdef Py_ssize_t left = num[0]
    while left and end - at > 5:
        if at[0] == 0xcd:
            at += 3
        elif at[0] < 0x80:
            at += 1
        elif at[0] == 0xce:
            at += 5
        elif at[0] == 0xcc:
            at += 2
        else:
            break
        left -= 1
    num[0] = left
    return at


cdef inline void _skip_values(Reader *reader, Py_ssize_t num) noexcept nogil:
    """Skip values of any type, with the values inside them."""
    cdef uint8_t first
    cdef int64_t left
    reader.at = _pass_ints(reader.at, reader.end, &num)
    left = num
    while left > 0 and reader.error == NULL:
        left -= 1
        first = _read_byte(reader)
        if first < 0x80 or first >= 0xe0 or first in (0xc0, 0xc2, 0xc3):
            continue
        if first < 0x90:
            left += 2 * (first & 0x0f)
        elif first < 0xa0:
            left += first & 0x0f
        elif first < 0xc0:
            _skip_bytes(reader, first & 0x1f)
        elif first in (0xc4, 0xc5, 0xc6):
            _skip_bytes(reader, _read_number(reader, 1 << (first - 0xc4)))
        elif first in (0xc7, 0xc8, 0xc9):
            _skip_bytes(reader, _read_number(reader, 1 << (first - 0xc7)) + 1)
        elif first in (0xca, 0xcb):
            _skip_bytes(reader, 4 << (first - 0xca))
        elif 0xcc <= first <= 0xcf:
            _skip_bytes(reader, 1 << (first - 0xcc))
        elif 0xd0 <= first <= 0xd3:
            _skip_bytes(reader, 1 << (first - 0xd0))
        elif 0xd4 <= first <= 0xd8:
            _skip_bytes(reader, 1 + (1 << (first - 0xd4)))
        elif 0xd9 <= first <= 0xdb:
            _skip_bytes(reader, _read_number(reader, 1 << (first - 0xd9)))
        elif first in (0xdc, 0xdd):
            left += <int64_t>_read_number(reader, 2 << (first - 0xdc))
        elif first in (0xde, 0xdf):
            left += 2 * <int64_t>_read_number(reader, 2 << (first - 0xde))
        else:
            _fail(reader, "got a byte that msgpack does not use")


cdef inline uint64_t _read_int(Reader *reader) noexcept nogil:
    """Read an int of at most 64 bits; a negative one as its two's complement."""
    cdef uint8_t first
    cdef int unused
    if reader.end - reader.at >= 9 and reader.at[0] == 0xcf:  # nearly every hash
        reader.at += 1
        return _read_number(reader, 8)
    first = _read_byte(reader)
    if first < 0x80:
        return first
    if first >= 0xe0:
        return <uint64_t>(<int64_t>first - 256)
    if 0xcc <= first <= 0xcf:
        return _read_number(reader, 1 << (first - 0xcc))
    if 0xd0 <= first <= 0xd3:
        unused = 64 - (8 << (first - 0xd0))
        return <uint64_t>(<int64_t>(_read_number(reader, 1 << (first - 0xd0)) << unused) >> unused)
    _fail(reader, "got another type, allowed: an int")
    return 0


cdef inline Text _read_text(Reader *reader) noexcept nogil:
    """Read a string or bytes; return empty text after an error."""
    cdef uint8_t first = _read_byte(reader)
    cdef uint64_t size = 0
    cdef Text text
    if 0xa0 <= first < 0xc0:
        size = first & 0x1f
    elif 0xd9 <= first <= 0xdb:
        size = _read_number(reader, 1 << (first - 0xd9))
    elif 0xc4 <= first <= 0xc6:
        size = _read_number(reader, 1 << (first - 0xc4))
    else:
        _fail(reader, "got another type, allowed: text")
    text = Text(at=reader.at, size=<Py_ssize_t>size)
    _skip_bytes(reader, size)
    if reader.error != NULL:
        text.size = 0  # the address stays: a build that traces lines converts results to Python, and NULL would crash it
    return text


cdef inline bint _is_int(const Reader *reader) noexcept nogil:
    cdef uint8_t first
    if reader.at == reader.end:
        return True
    first = reader.at[0]
    return first < 0x80 or first >= 0xe0 or 0xcc <= first <= 0xd3


cdef inline int32_t _read_size(Reader *reader, int32_t highest) noexcept nogil:
    """Read an int from 0 to `highest`; return -1 for any other value."""
    cdef uint64_t number = 0
    if _is_int(reader):
        number = _read_int(reader)
    else:
        _skip_values(reader, 1)
        return -1
    return <int32_t>number if number <= <uint64_t>highest else -1


cdef inline bint _is_string(const Reader *reader) noexcept nogil:
    """Whether a string or bytes follow."""
    cdef uint8_t first
    if reader.at == reader.end:
        return False
    first = reader.at[0]
    return 0xa0 <= first < 0xc0 or 0xd9 <= first <= 0xdb or 0xc4 <= first <= 0xc6


cdef inline uint64_t _read_hash(Reader *reader) noexcept nogil:
    """Read a hash: an int, or the last 64 bits of bytes."""
    cdef Text text
    cdef Reader last
    if _is_int(reader):
        return _read_int(reader)
    text = _read_text(reader)
    if reader.error == NULL and text.size < 8:
        _fail(reader, "got a hash of less than 8 bytes")
    if reader.error != NULL:
        return 0
    last = Reader(at=text.at + text.size - 8, end=text.at + text.size, error=NULL)
    return _read_number(&last, 8)


cdef inline bint _is_text(Text text, const char *name, Py_ssize_t size) noexcept nogil:
    return text.size == size and memcmp(text.at, name, size) == 0


cdef inline Field _field_of(Text name) noexcept nogil:
    """Return the field of a batch or event by its name."""
    if _is_text(name, "type", 4):
        return TYPE
    if _is_text(name, "block_hashes", 12):
        return HASHES
    if _is_text(name, "parent_block_hash", 17):
        return PARENT
    if _is_text(name, "token_ids", 9):
        return TOKENS
    if _is_text(name, "block_size", 10):
        return BLOCK_SIZE
    if _is_text(name, "medium", 6):
        return MEDIUM
    if _is_text(name, "group_idx", 9):
        return GROUP
    if _is_text(name, "kv_cache_spec_kind", 18):
        return SPEC_KIND
    if _is_text(name, "kv_cache_spec_sliding_window", 28):
        return WINDOW
    if _is_text(name, "num_groups", 10):
        return NUM_GROUPS
    if _is_text(name, "hit_tokens", 10):
        return HIT_TOKENS
    if _is_text(name, "events", 6):
        return EVENTS
    return OTHER


cdef inline Field _field_at(EventKind kind, Py_ssize_t index) noexcept nogil:
    """Return the field at an index of an event in array form. Index 0 follows the type."""
    cdef Field[11] stored = [HASHES, PARENT, TOKENS, BLOCK_SIZE, OTHER, MEDIUM, OTHER, OTHER, GROUP, SPEC_KIND, WINDOW]
    cdef Field[3] removed = [HASHES, MEDIUM, GROUP]
    if kind == STORED and index < 11:
        return stored[index]
    if kind == REMOVED and index < 3:
        return removed[index]
    return OTHER


cdef inline EventKind _read_kind(Reader *reader) noexcept nogil:
    cdef Text name = _read_text(reader)
    if reader.error == NULL:
        if _is_text(name, "BlockStored", 11):
            return STORED
        if _is_text(name, "BlockRemoved", 12):
            return REMOVED
        if _is_text(name, "AllBlocksCleared", 16):
            return CLEARED
    return NO_EVENT


cdef inline void _read_hashes(Reader *reader, EventBatch *batch, Event *event) noexcept nogil:
    cdef Py_ssize_t i, num = _read_array(reader)
    if not reserve_items(<void **>&batch.hashes, &batch.hash_capacity, batch.num_hashes + num, sizeof(uint64_t)):
        _fail(reader, NO_MEMORY)
        return
    event.first, event.num, event.has_hashes = batch.num_hashes, num, True
    for i in range(num):
        batch.hashes[batch.num_hashes + i] = _read_hash(reader)
        if rare(reader.error != NULL):
            return
    batch.num_hashes += num
    assert batch.num_hashes <= batch.hash_capacity


cdef inline void _read_spec_kind(Text name, Event *event) noexcept nogil:
    """Set the kind of a group's attention, by its name. Chunks count as full attention, because no event has their size."""
    event.has_kind = True
    event.spec.is_state = _is_text(name, "mamba", 5)
    if event.spec.is_state or _is_text(name, "sliding_window", 14) or _is_text(name, "sliding_window_mla", 18):
        return
    if _is_text(name, "full_attention", 14) or _is_text(name, "mla_attention", 13):
        return
    if _is_text(name, "sink_full_attention", 19) or _is_text(name, "chunked_local_attention", 23):
        return
    event.has_kind = False
    event.is_misfit |= name.size > 0


cdef inline void _read_field(Reader *reader, EventBatch *batch, Event *event, Field field) noexcept nogil:
    """Read a field of an event. None leaves the field unchanged, and so do most fields with a value of another type.
    """
    cdef int32_t size
    if field == TYPE:
        event.kind = _read_kind(reader)
    elif field in (OTHER, EVENTS):
        _skip_values(reader, 1)
    elif _is_none(reader):
        return
    elif field == TOKENS:
        _skip_values(reader, _read_array(reader))
    elif field == HASHES:
        _read_hashes(reader, batch, event)
    elif field == PARENT:
        event.has_parent = _is_int(reader) or _is_string(reader)
        if event.has_parent:
            event.parent = _read_hash(reader)
        else:
            _skip_values(reader, 1)
    elif field == MEDIUM or field == SPEC_KIND:
        if not _is_string(reader):
            event.is_nowhere |= field == MEDIUM
            event.is_misfit = True
            _skip_values(reader, 1)
        elif field == MEDIUM:
            event.medium = _read_text(reader)
        else:
            _read_spec_kind(_read_text(reader), event)
    else:
        size = _read_size(reader, MAX_EVENT_GROUPS - (field == GROUP) if field in (GROUP, NUM_GROUPS) else MAX_BLOCK_SIZE)
        event.is_misfit |= size < 0
        event.is_nowhere |= size < 0 and field == GROUP
        _take_size(event, field, max(size, <int32_t>0))


cdef inline void _take_size(Event *event, Field field, int32_t size) noexcept nogil:
    if field == BLOCK_SIZE:
        event.spec.block_size = size
    elif field == GROUP:
        event.group = size
    elif field == NUM_GROUPS:
        event.told.num_groups = size
    elif field == HIT_TOKENS:
        event.told.hit_tokens = size
    else:
        event.spec.window = size


cdef inline void _add_event(Reader *reader, EventBatch *batch, Event *event) noexcept nogil:
    """Add an event to the batch. An event that clears everything makes the events before it void."""
    if event.kind == CLEARED:
        batch.num_hashes = batch.num_stored = 0
        batch.num_void, batch.is_cleared = batch.num_events, True
        assert batch.num_void <= batch.capacity
        return
    if event.kind == STORED and (event.is_misfit or event.spec.block_size == 0):
        event.kind = LEFT_OUT
    if event.kind == NO_EVENT or event.is_nowhere or not event.has_hashes:
        batch.num_skipped += 1
    elif not reserve_items(<void **>&batch.events, &batch.capacity, batch.num_events + 1, sizeof(Event)):
        _fail(reader, NO_MEMORY)
    else:
        batch.events[batch.num_events] = event[0]
        batch.num_events += 1
        batch.num_skipped += event.kind == LEFT_OUT
        batch.num_stored += event.num if event.kind == STORED else 0
        assert 0 <= event.first <= event.first + event.num <= batch.num_hashes
        assert batch.num_void < batch.num_events <= batch.capacity
        assert batch.num_stored <= batch.num_hashes
        assert event.kind != STORED or 0 < event.spec.block_size <= MAX_BLOCK_SIZE


cdef inline bint is_on_device(const Event *event) noexcept nogil:
    """Whether an event's blocks are in GPU memory; they are if it names no medium."""
    return event.medium.at == NULL or _is_text(event.medium, "GPU", 3)


cdef inline void leave_out(EventBatch *batch, Py_ssize_t i) noexcept nogil:
    """Leave out a stored event."""
    cdef Event *event = &batch.events[i]
    assert event.kind == STORED
    event.kind = LEFT_OUT
    batch.num_stored -= event.num if i >= batch.num_void else 0
    batch.num_skipped += 1
    assert batch.num_stored >= 0


cdef inline void _read_fields(Reader *reader, EventBatch *batch, Event *event) noexcept nogil:
    cdef Py_ssize_t i, num, _
    cdef Text name
    if _is_map(reader):
        num = _read_map(reader)
        for _ in range(num):
            name = _read_text(reader)
            if rare(reader.error != NULL):
                return
            _read_field(reader, batch, event, _field_of(name))
    else:
        num = _read_array(reader)
        if num:
            event.kind = _read_kind(reader)
        for i in range(num - 1):
            if rare(reader.error != NULL):
                return
            _read_field(reader, batch, event, _field_at(event.kind, i))


cdef inline void _read_event(Reader *reader, EventBatch *batch) noexcept nogil:
    """Read an event. An unknown one is skipped like any value of msgpack, which fails only if its bytes are broken."""
    cdef Event event
    cdef const uint8_t *start = reader.at
    cdef Py_ssize_t num_hashes = batch.num_hashes
    memset(&event, 0, sizeof(Event))
    _read_fields(reader, batch, &event)
    if reader.error == NULL:
        _add_event(reader, batch, &event)
    elif reader.error != NO_MEMORY:
        reader.at, reader.error = start, NULL
        _skip_values(reader, 1)
        batch.num_hashes = num_hashes
        batch.num_skipped += 1


cdef inline void _read_events(Reader *reader, EventBatch *batch) noexcept nogil:
    cdef Py_ssize_t _, num = _read_array(reader)
    for _ in range(num):
        if rare(reader.error != NULL):
            return
        _read_event(reader, batch)


cdef inline void read_batch(Reader *reader, EventBatch *batch) noexcept nogil:
    """Read a payload, which is one batch and nothing else. The caller frees the batch, after an error too."""
    cdef Py_ssize_t i, num
    cdef bint has_names = _is_map(reader), has_events = False
    cdef bint is_events
    cdef Text name
    memset(batch, 0, sizeof(EventBatch))
    num = _read_map(reader) if has_names else _read_array(reader)
    for i in range(num):
        is_events = i == 1
        if has_names:
            name = _read_text(reader)
            is_events = reader.error == NULL and _field_of(name) == EVENTS
        if rare(reader.error != NULL):
            return
        if is_events:
            has_events = True
            _read_events(reader, batch)
        else:
            _skip_values(reader, 1)
    if not has_events:
        _fail(reader, "a batch has no events")
    if reader.error == NULL and reader.at != reader.end:
        _fail(reader, "bytes follow the batch")


cdef inline double read_seconds(Reader *reader) noexcept nogil:
    """Read the time of a batch, its first value; 0 unless it is a finite float."""
    cdef uint64_t number
    cdef double seconds = 0
    if _is_map(reader):
        _read_map(reader)
        _read_text(reader)
    else:
        _read_array(reader)
    if reader.error == NULL and _read_byte(reader) == 0xcb:
        number = _read_number(reader, 8)
        memcpy(&seconds, &number, sizeof(seconds))
    return seconds if reader.error == NULL and seconds - seconds == 0 else 0


cdef inline void free_batch(EventBatch *batch) noexcept nogil:
    raw_free(batch.events)
    raw_free(batch.hashes)
