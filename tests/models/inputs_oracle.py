"""The inputs of a step in plain Python, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Values = list[int]
Pages = Sequence[Sequence[int]]


class RowTokens(NamedTuple):
    """The tokens of a row in a step."""

    row: int
    start: int
    stop: int
    known: Values  # all known tokens of the row
    pages: Pages  # by group
    drafts: Values  # ids of unknown tokens; where they end, -1
    is_ahead: bool = False  # its first token is sampled by a step before
    source: int = -1  # place of the row, in the set filled before, whose step samples the row's first token


class Padding(NamedTuple):
    """What stands behind a step's tokens and rows."""

    num_tokens: int
    num_reqs: int
    slot: int
    last: int


def id_at(tokens: RowTokens, position: int) -> int:
    """Return the id of a token: a known one's, a draft's, or -1."""
    if position < len(tokens.known):
        return tokens.known[position]
    index = position - max(tokens.start + tokens.is_ahead, len(tokens.known))
    return tokens.drafts[index] if 0 <= index < len(tokens.drafts) else -1


class Group(NamedTuple):
    """What the fields of a group depend on."""

    page_size: int | None  # None: a state
    window: int = 0  # tokens, itself included, to which a token attends; 0: all
    capacity: int = 0  # pages for which a list has room
    stride: int = 0  # slots of a page


def list_pages(rows: Sequence[RowTokens], index: int, group: Group) -> list[tuple[int, Values]]:
    """Return the pages that each row reads, those to which one of its tokens attends, and the place of the first."""
    listed = []
    for tokens in rows if group.page_size else ():
        size = group.page_size
        first = tokens.start - group.window + 1 if group.window else 0
        places = sorted({position // size for position in range(max(0, first), tokens.stop)})
        listed.append((places[0], [tokens.pages[index][place] for place in places]))
    return listed


def list_inputs(
    step: Sequence[RowTokens], groups: Sequence[Group], padding: Padding, decodes_first: bool, ranks: tuple[int, int] = (0, 1)
) -> dict[str, list[Values] | Values]:
    """Return the values of each field; of fields by group a list for each."""
    page_sizes = [group.page_size for group in groups]
    order = list(range(len(step)))
    if decodes_first:
        order.sort(key=lambda i: step[i].stop - step[i].start > 1)
    rows = [step[i] for i in order]
    positions = [(tokens, position) for tokens in rows for position in range(tokens.start, tokens.stop)]
    begins, keys = [0], [0]
    for tokens in rows:
        begins.append(begins[-1] + tokens.stop - tokens.start)
        keys.append(keys[-1] + tokens.stop)

    def by_token(values: Values, pad: int) -> Values:
        return values + [pad] * (padding.num_tokens - len(values))

    def by_row(values: Values, pad: int, num_more: int = 0) -> Values:
        return values + [pad] * (padding.num_reqs + num_more - len(values))

    slots = [
        by_token([t.pages[g][at // size] * groups[g].stride + at % size for t, at in positions] if size else [], padding.slot)
        for g, size in enumerate(page_sizes)
    ]
    rank, num_ranks = ranks
    rank_slots = [
        [
            t.pages[g][at // size] * (size // num_ranks) + at % size // num_ranks if at % num_ranks == rank else padding.slot
            for t, at in positions
        ]
        if size
        else []
        for g, size in enumerate(page_sizes)
    ]
    listed = [list_pages(rows, g, group) for g, group in enumerate(groups)]
    page_starts = [[sum(len(ids) for _, ids in own[:i]) for i in range(len(own) + 1)] for own in listed]
    page_indices = [[page for _, ids in own for page in ids] for own in listed]
    num_single = sum(t.stop - t.start == 1 for t in rows)
    return {
        "token_ids": by_token([id_at(t, at) for t, at in positions], 0),
        "positions": by_token([at for _, at in positions], 0),
        "rows": by_token([t.row for t, _ in positions], 0),
        "slots": slots,
        "rank_slots": [by_token(values, padding.slot) for values in rank_slots],
        "page_starts": [by_row(values, values[-1], 1) for values in page_starts],
        "page_indices": [ids + [0] * (group.capacity - len(ids)) for ids, group in zip(page_indices, groups, strict=True)],
        "last_page_lens": [by_row([(t.stop - 1) % (size or 1) + 1 for t in rows], 0) for size in page_sizes],
        "page_offsets": [by_row([first * size for first, _ in own], 0) for own, size in zip(listed, page_sizes, strict=True)],
        "query_start_loc": by_row(begins, begins[-1], 1),
        "kv_start_loc": by_row(keys, keys[-1], 1),
        "seq_lens": by_row([t.stop for t in rows], 0),
        "last_tokens": by_row([end - 1 for end in begins[1:]], padding.last),
        "starts": by_row([t.start for t in rows], 0),
        "sources": by_row([t.source for t in rows], -1),
        "state_pages": [by_row([t.pages[g][0] for t in rows] if size is None else [], 0) for g, size in enumerate(page_sizes)],
        "order": by_row(order, 0),
        "distribution": [num_single, num_single, len(rows)],
    }
