"""Random chats on twins: prompts long enough for checkpoints, so that each class of them is reached."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from features import Features
from pairs import make_requests, make_rows
from settings import Group, Setting, sizes
from twin_engine import Request
from twins import Twins

STATES = Features(states=True, forks=True)
NUM_ROWS = 3
FIRST, QUESTION, ANSWER = (40, 300), (5, 150), (1, 260)  # tokens


@dataclass(frozen=True)
class ChatSetting(Setting):
    """A setting of long rows."""

    @property
    def max_model_len(self) -> int:
        return 2048


def state(pool: str = "states") -> Group:
    return Group("mamba", 64, interval=512, pool=pool)


FULL = Group("full", 32)
CHAT_SETTINGS = [
    ChatSetting("few states", (FULL, state()), (sizes(300, 9),)),
    ChatSetting("many states", (FULL, state()), (sizes(300, 30),)),
    ChatSetting("few pages", (FULL, state()), (sizes(140, 24),)),
    ChatSetting("two states", (FULL, state(), state()), (sizes(300, 24),)),
    ChatSetting("window", (FULL, Group("sliding", 32, 100), state()), (sizes(500, 16),)),
    ChatSetting("shards", (FULL, state()), (sizes(320, 20),), data_parallel_size=2),
    ChatSetting("one pool", (FULL, state("kv")), (300,)),
    ChatSetting("one ahead", (FULL, state()), (sizes(300, 16),), max_steps_ahead=1),
    ChatSetting("three ahead", (FULL, state(), state()), (sizes(300, 30),), max_steps_ahead=3),
]


class Chats:
    """The histories of chats, some with a system prompt, and where each can go back to."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.systems = [self.draw(200), self.draw(90)]
        self.histories: list[list[list[int]]] = []

    def draw(self, num_tokens: int) -> list[int]:
        return [self.rng.randrange(1 << 7) for _ in range(num_tokens)]

    def draw_prompt(self) -> tuple[list[list[int]], list[int]]:
        """Return a chat and its next prompt: a new chat's, the next turn's, one that was sent before, or an edited one."""
        rng = self.rng
        if len(self.histories) < 4 or rng.random() < 0.1:
            system = rng.choice((*self.systems, []))
            self.histories = [*self.histories[-11:], [system + self.draw(rng.randint(*FIRST))]]
            return self.histories[-1], self.histories[-1][0]
        chat = rng.choice(self.histories)
        if rng.random() < 0.15:
            return chat, chat[-1]
        if len(chat) > 2 and rng.random() < 0.15:
            del chat[-rng.randint(1, 2) :]
        return chat, chat[-1] + self.draw(rng.randint(*QUESTION))


class RowChats:
    """Turns of chats on the rows of twins. Some are aborted, some forked."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self.rng, self.setting = Random(seed), setting
        self.twins = make_rows(setting, setting.num_pages[0], STATES, seed, num_rows=NUM_ROWS)
        self.chats = Chats(self.rng)
        self.running: dict[int, list[list[int]]] = {}  # the chat of each row

    def run(self, num_turns: int) -> Twins:
        for _ in range(num_turns):
            row = self.rng.randrange(NUM_ROWS)
            if row in self.running:
                self.release(row)
            self.begin(row)
            if self.rng.random() < 0.15:
                self.fork(row)
        for row in list(self.running):
            self.release(row)
        self.twins.require_same_figures()
        return self.twins

    def begin(self, row: int) -> None:
        """Compute a prompt, and an answer in parts; some answers stay short."""
        rng, (chat, prompt) = self.rng, self.chats.draw_prompt()
        placement = {"dp_shard": rng.choice((None, 0, 1))} if self.setting.data_parallel_size else {}
        if len(prompt) + ANSWER[1] >= self.setting.max_model_len:
            self.chats.histories.remove(chat)
            return
        if self.twins.call("admit", row, prompt, **placement) is None:
            for other in list(self.running):
                self.release(other)
            return
        self.running[row] = chat
        self.go_on(row, rng.randint(*ANSWER))

    def go_on(self, row: int, num_tokens: int) -> None:
        """Compute so many tokens of an answer, or fewer."""
        if self.setting.max_steps_ahead:
            self.decode_ahead(row, min(num_tokens, 80))
            num_tokens -= 80
        while num_tokens > 0 and self.rng.random() < 0.97:
            self.twins.call("take_moves")
            part = self.chats.draw(min(num_tokens, self.rng.choice((1, 10, 40, 70))))
            self.twins.call("append", [row] * len(part), part)
            grown = self.twins.call("plan", [row], len(part))
            if grown is None or grown.num_grown == 0:  # None: a step has failed
                break
            num_tokens -= len(part)
        self.twins.call("take_moves")

    def decode_ahead(self, row: int, num_tokens: int) -> None:
        """Decode token by token, each step planned ahead of the one before; now and then the last steps fail."""
        call, steps = self.twins.call, []
        call("take_moves")
        for token_id in self.chats.draw(num_tokens):
            if len(steps) <= self.setting.max_steps_ahead:
                step = call("new_step")
                if not call("plan", [row], 1, step=step):
                    break
                steps.append(step)
                call("take_moves")
            elif self.rng.random() < 0.01:
                lost = call("fail_step", steps[-1]) or []
                for each in lost:
                    self.running.pop(each)
                return
            else:
                call("settle", steps.pop(0), [token_id])
        for step in steps:
            call("settle", step, self.chats.draw(1))
        call("take_moves")

    def fork(self, row: int) -> None:
        """Let another row go on where a row is, and both go on."""
        free = [other for other in range(NUM_ROWS) if other not in self.running]
        if row in self.running and free:
            self.twins.call("fork", row, free[:1])
            if self.twins.oracle.requests[free[0]] is not None:
                self.running[free[0]] = self.running[row]
                for each in (free[0], row):
                    self.go_on(each, self.rng.randint(*ANSWER))

    def release(self, row: int) -> None:
        chat, request = self.running.pop(row), self.twins.oracle.requests[row]
        chat.append(list(request.all_token_ids))
        self.twins.call("release", [row])
        self.twins.call("take_moves")


class RequestChats:
    """Turns of chats as requests of twins, one after another, some of them aborted."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self.rng, self.setting = Random(seed), setting
        self.twins = make_requests(setting, setting.num_pages[0], STATES, seed)
        self.chats = Chats(self.rng)

    def run(self, num_turns: int) -> Twins:
        for number in range(num_turns):
            chat, prompt = self.chats.draw_prompt()
            if len(prompt) + ANSWER[1] >= self.setting.max_model_len:
                self.chats.histories.remove(chat)
            else:
                self.run_turn(chat, Request(f"turn{number}", list(prompt)))
        self.twins.require_same_figures()
        return self.twins

    def run_turn(self, chat: list[list[int]], request: Request) -> None:
        rng, call = self.rng, self.twins.call
        self.twins.live_request_ids[request.request_id] = None
        _, num_hit_tokens = call("look_up", request)
        num_new, num_left = request.num_tokens - num_hit_tokens, rng.randint(*ANSWER)
        while call("allocate", request, num_new, num_hit_tokens) is not None:
            request.num_computed_tokens, num_hit_tokens = request.num_tokens, 0
            call("take_moves")
            if num_left <= 0 or rng.random() < 0.03:
                break
            part = self.chats.draw(min(num_left, rng.choice((1, 10, 40, 70))))
            request.all_token_ids += part
            num_new, num_left = len(part), num_left - len(part)
        call("free", request)
        call("take_moves")
        del self.twins.live_request_ids[request.request_id]
        chat.append(list(request.all_token_ids))
