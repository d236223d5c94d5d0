"""Beam search: the most probable answers to a prompt, by the sum of the logarithms of their tokens' probabilities."""

from collections.abc import Sequence
from heapq import nlargest

from request import Request, SamplingParams

__all__ = ["Beam", "BeamSearch"]


class Beam(Request):
    """The beginning of an answer, with its score."""

    def __init__(self, prompt: Sequence[int], params: SamplingParams, number: int, search: "BeamSearch") -> None:
        """Return a beam without generated tokens."""
        super().__init__(prompt, params, number)
        self.search = search
        self.score = 0.0

    @property
    def is_sampled(self) -> bool:
        """Whether a step samples its next token: it is chosen among the candidates of all beams."""
        return False

    def extend(self, token_id: int, score: float) -> "Beam":
        """Return this beam extended by one token."""
        child = Beam([*self.token_ids, token_id], self.params, self.number, self.search)
        child.num_prompt_tokens, child.num_cached_tokens, child.score = self.num_prompt_tokens, self.num_cached_tokens, score
        return child


class BeamSearch:
    """The `num_beams` best beams of a prompt. A finished beam stays until a better one replaces it."""

    def __init__(self, prompt: Sequence[int], params: SamplingParams, number: int, num_beams: int) -> None:
        """Raise ValueError unless `num_beams` is positive. Temperature, top-k and seed of `params` are ignored."""
        if num_beams < 1:
            raise ValueError(f"num_beams: got {num_beams}, allowed: at least 1")
        self.num_beams = num_beams
        self.beams = [Beam(prompt, params, number, self)]  # best first

    @property
    def is_ready(self) -> bool:
        """Whether every unfinished beam has candidates."""
        return all(beam.is_finished or beam.candidates for beam in self.beams)

    def choose(self) -> list[tuple[Beam, list[Beam]]]:
        """Choose the best continuations. Return each unfinished beam with its chosen children."""
        parents = [beam for beam in self.beams if not beam.is_finished]
        options = [(beam.score, beam, None) for beam in self.beams if beam.is_finished] + [
            (parent.score + log_probability, parent, token_id)
            for parent in parents
            for token_id, log_probability in parent.candidates
        ]
        best = nlargest(self.num_beams, options, key=lambda option: option[0])
        children: dict[Beam, list[Beam]] = {parent: [] for parent in parents}
        self.beams = []
        for score, beam, token_id in best:
            if token_id is None:
                self.beams.append(beam)
            else:
                self.beams.append(beam.extend(token_id, score))
                children[beam].append(self.beams[-1])
        return list(children.items())
