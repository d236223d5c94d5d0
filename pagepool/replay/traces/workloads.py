"""Kinds of synthetic workloads. The seed draws sizes, popularities, pauses and shares too, so each seed is another workload.

The unit of time is the mean time between two requests: a pause of 100 lets about 100 other requests pass. Arrivals never end.
"""

from collections.abc import Callable, Iterator
from itertools import count, repeat
from typing import NamedTuple

from pagepool.replay.traces.arrivals import MAX_LENGTH, Arrival, Part, Popularity, Source, blend, in_order

START_TIME = -3000.0  # chats and agents begin here, so that many are active at 0
LONG_PAUSE = 20  # factor of a usual pause: an agent waits for a person
MAX_NUM_DOCUMENTS = 3  # in a prompt


class Conversations:
    """Chats of many people: each turn repeats the chat so far, after a think time. Some chats have only one turn, and a chat
    that is too long ends.
    """

    def __init__(self, source: Source) -> None:
        """Draw the parameters."""
        self._source = source
        num_system_prompts = int(source.scale(1, 40))
        self._system_prompts = source.new_parts(num_system_prompts, source.scale(60, 800))
        self._popularity = Popularity(num_system_prompts, source.uniform(0.6, 1.4))
        self._first_length, self._message_length = source.scale(40, 800), source.scale(30, 300)
        self._answer_length = source.scale(60, 400)
        self._share_of_single_turns, self._mean_turns = source.uniform(0, 0.6), source.uniform(2, 7)
        self._think_time, self._spread = source.scale(50, 400), source.uniform(0.5, 1.2)
        self._max_length = source.scale(2500, 6000)

    def arrivals(self) -> Iterator[Arrival]:
        """Yield all turns in order."""
        return in_order(self._chats())

    def _chats(self) -> Iterator[list[Arrival]]:
        mean_turns = self._share_of_single_turns + (1 - self._share_of_single_turns) * self._mean_turns
        time = START_TIME
        for number in count(1):
            time += self._source.rng.exponential(mean_turns)
            yield self._chat(time, number)

    def _chat(self, time: float, number: int) -> list[Arrival]:
        source = self._source
        single = source.happens(self._share_of_single_turns)
        num_turns = 1 if single else int(source.rng.geometric(1 / self._mean_turns))
        system_prompt = self._system_prompts[self._popularity.draw(source.rng)]
        history = source.new_part(source.length(self._first_length))
        turns: list[Arrival] = []
        for turn in range(1, num_turns + 1):
            answer_length = source.length(self._answer_length)
            turns.append(Arrival(time, f"chat {number} turn {turn}", (system_prompt, history), answer_length))
            history = history.grow(answer_length + source.length(self._message_length))
            if history.length > self._max_length:
                break
            time += source.pause(self._think_time, self._spread)
        return turns


class Agents:
    """Programs that call a model step by step: the context grows by each answer and each tool's result. A context that is too
    long is replaced by a summary. Some steps delegate a subtask with its own context, and some wait for a person.
    """

    def __init__(self, source: Source) -> None:
        """Draw the parameters."""
        self._source = source
        num_tools = int(source.scale(1, 8))
        self._tools = source.new_parts(num_tools, source.scale(500, 2000))
        self._popularity = Popularity(num_tools, source.uniform(0.3, 1.3))
        self._task_length, self._summary_length = source.scale(60, 800), source.scale(150, 600)
        self._result_length, self._answer_length = source.scale(40, 400), source.scale(20, 120)
        self._mean_steps, self._max_length = source.scale(6, 40), source.scale(1500, 4000)
        self._mean_substeps = 1 + self._mean_steps / 4
        self._pause = source.scale(20, 200)
        self._share_of_waits, self._share_of_subtasks = source.uniform(0, 0.06), source.uniform(0, 0.08)

    def arrivals(self) -> Iterator[Arrival]:
        """Yield all steps in order."""
        return in_order(self._agents())

    def _agents(self) -> Iterator[list[Arrival]]:
        interval = self._mean_steps * (1 + self._share_of_subtasks * self._mean_substeps)
        time = START_TIME
        for number in count(1):
            time += self._source.rng.exponential(interval)
            yield self._run(f"agent {number}", time, self._mean_steps, self._share_of_subtasks)

    def _run(self, name: str, time: float, mean_steps: float, share_of_subtasks: float) -> list[Arrival]:
        """Return the steps of an agent and of its subtasks; the agent waits during a subtask."""
        source = self._source
        tools = self._tools[self._popularity.draw(source.rng)]
        context = source.new_part(source.length(self._task_length))
        steps: list[Arrival] = []
        for step in range(1, 1 + int(source.rng.geometric(1 / mean_steps))):
            answer_length = source.length(self._answer_length)
            steps.append(Arrival(time, f"{name} step {step}", (tools, context), answer_length))
            if source.happens(share_of_subtasks):
                steps += self._run(f"{name} step {step} subtask", self._next_time(time), self._mean_substeps, 0)
            time = self._next_time(steps[-1].time)
            context = self._next_context(context, answer_length)
        return steps

    def _next_time(self, time: float) -> float:
        median = self._pause * (LONG_PAUSE if self._source.happens(self._share_of_waits) else 1)
        return time + self._source.pause(median, 0.6)

    def _next_context(self, context: Part, answer_length: int) -> Part:
        longer = context.grow(answer_length + self._source.length(self._result_length))
        if longer.length <= self._max_length:
            return longer
        return self._source.new_part(self._source.length(self._summary_length))


class Questions:
    """Questions about documents: some of the documents are popular, all others are read once."""

    def __init__(self, source: Source) -> None:
        """Draw the parameters."""
        self._source = source
        self.num_documents = int(source.scale(20, 300))
        self._num_together = int(source.rng.integers(1, MAX_NUM_DOCUMENTS, endpoint=True))
        self._document_length = source.scale(500, 1800) / self._num_together
        num_system_prompts = int(source.rng.integers(1, 4, endpoint=True))
        self._system_prompts = source.new_parts(num_system_prompts, source.scale(30, 300))
        self._system_popularity = Popularity(num_system_prompts, 1)
        self._documents = source.new_parts(self.num_documents, self._document_length)
        self._popularity = Popularity(self.num_documents, source.uniform(0.5, 1.2))
        self._share_of_others = source.uniform(0.2, 0.7)
        self._question_length, self._answer_length = source.scale(10, 80), source.scale(30, 200)

    def arrivals(self, renewals: Iterator[int]) -> Iterator[Arrival]:
        """Yield questions; `renewals` has the number of popular documents to replace before each question."""
        source = self._source
        for number, num_replaced in enumerate(renewals, start=1):
            for rank in source.rng.permutation(self.num_documents)[:num_replaced]:
                self._documents[rank] = source.new_part(source.length(self._document_length))
            system_prompt = self._system_prompts[self._system_popularity.draw(source.rng)]
            question = source.new_part(source.length(self._question_length))
            parts = (system_prompt, *self._choose_documents(), question)
            yield Arrival(number, f"question {number}", parts, source.length(self._answer_length))

    def _choose_documents(self) -> list[Part]:
        """Return distinct documents in a fixed order, so that equal choices make equal prefixes."""
        source = self._source
        if source.happens(self._share_of_others):
            return source.new_parts(self._num_together, self._document_length)
        ranks = {self._popularity.draw(source.rng) for _ in range(self._num_together)}
        return [self._documents[rank] for rank in sorted(ranks)]


class Chat(NamedTuple):
    """A chat of `Recency`, up to its last answer."""

    number: int
    num_turns: int
    history: Part


class Recency:
    """Chats for which LRU is optimal: a chat's probability of continuing falls with the number of other chats used since, and
    depends on nothing else. A chat at its maximum length repeats its last tokens.
    """

    def __init__(self, source: Source) -> None:
        """Draw the parameters."""
        self._source = source
        self._chats: list[Chat] = []  # the most recently used chat is last
        self._max_num_chats = int(source.scale(200, 800))
        self._depths = Popularity(self._max_num_chats, source.uniform(1.1, 1.5))
        self._share_of_new = source.uniform(0.03, 0.2)
        self._first_length, self._message_length = source.scale(300, 1500), source.scale(20, 200)
        self._answer_length, self._max_length = source.scale(20, 200), int(source.scale(MAX_LENGTH + 100, 4000))

    def arrivals(self) -> Iterator[Arrival]:
        """Yield all turns in order."""
        source, numbers = self._source, count(1)
        for time in count(1):
            chat = self._take_chat() or Chat(next(numbers), 0, source.new_part(source.length(self._first_length)))
            answer_length, turn = source.length(self._answer_length), chat.num_turns + 1
            longer = chat.history.length + source.length(self._message_length) + answer_length
            history = Part(chat.history.stream, min(longer, self._max_length))
            self._chats.append(Chat(chat.number, turn, history))
            del self._chats[: -self._max_num_chats]
            yield Arrival(time, f"chat {chat.number} turn {turn}", (history.grow(-answer_length),), answer_length)

    def _take_chat(self) -> Chat | None:
        """Take out the chat to continue; None starts a new one."""
        depth = self._depths.draw(self._source.rng)
        if self._source.happens(self._share_of_new) or depth >= len(self._chats):
            return None
        return self._chats.pop(-1 - depth)


def _conversations(seed: int) -> Iterator[Arrival]:
    return Conversations(Source(seed)).arrivals()


def _agents(seed: int) -> Iterator[Arrival]:
    return Agents(Source(seed)).arrivals()


def _retrieval(seed: int) -> Iterator[Arrival]:
    """Generate questions while popular documents stay popular."""
    return Questions(Source(seed)).arrivals(repeat(0))


def _shift(seed: int) -> Iterator[Arrival]:
    """Generate questions while most or all popular documents are replaced at once, again and again."""
    source = Source(seed)
    questions = Questions(source)
    num_replaced = int(questions.num_documents * source.uniform(0.6, 1))
    mean_interval = source.scale(200, 800)

    def renew() -> Iterator[int]:
        while True:
            yield from repeat(0, int(mean_interval * source.uniform(0.5, 1.5)))
            yield num_replaced

    return questions.arrivals(renew())


def _drift(seed: int) -> Iterator[Arrival]:
    """Generate questions while popular documents are replaced one by one."""
    source = Source(seed)
    questions = Questions(source)
    rate = questions.num_documents / source.scale(200, 1500)
    return questions.arrivals(int(source.rng.poisson(rate)) for _ in count())


def _loop(seed: int) -> Iterator[Arrival]:
    """Read a list of documents from first to last, again and again, while people chat."""
    source = Source(seed)
    share = source.uniform(0.6, 0.9)
    return blend([(share, _read_in_order(source)), (1 - share, Conversations(Source(seed, 1)).arrivals())])


def _read_in_order(source: Source) -> Iterator[Arrival]:
    documents = source.new_parts(int(source.scale(300, 500)), source.scale(1200, 1600))
    instructions = source.new_part(source.length(source.scale(20, 400)))
    question_length, answer_length = source.scale(10, 80), source.scale(10, 120)
    readings = ((number, place, document) for number in count(1) for place, document in enumerate(documents, start=1))
    for time, (number, place, document) in enumerate(readings, start=1):
        parts = (instructions, document, source.new_part(source.length(question_length)))
        yield Arrival(time, f"document {place} round {number}", parts, source.length(answer_length))


def _recency(seed: int) -> Iterator[Arrival]:
    return Recency(Source(seed)).arrivals()


def _mix(seed: int) -> Iterator[Arrival]:
    """Mix conversations, agents and retrieval."""
    chats, agents, questions = (Source(seed, number) for number in range(3))
    kinds = Conversations(chats).arrivals(), Agents(agents).arrivals(), Questions(questions).arrivals(repeat(0))
    shares = 0.15 + 0.55 * chats.rng.dirichlet((1, 1, 1))  # shares, each at least 15 %, with sum 1
    return blend(list(zip(shares.tolist(), kinds, strict=True)))


KINDS: dict[str, Callable[[int], Iterator[Arrival]]] = {
    "conversations": _conversations,
    "agents": _agents,
    "retrieval": _retrieval,
    "shift": _shift,
    "drift": _drift,
    "loop": _loop,
    "recency": _recency,
    "mix": _mix,
}
"""Functions that make arrivals from a seed, by the name of the workload."""
