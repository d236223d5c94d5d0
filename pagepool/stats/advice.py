"""Which of several pools is too small, in a sentence."""

from pagepool.stats import CacheStats

LEAST_SHARE = 0.01  # of prompt tokens: below this the split is fine


class Advisor:
    """Compare what pools lost since the last advice."""

    def __init__(self, stats: CacheStats, num_queried_tokens: int) -> None:
        """Begin with the counts of now: the pool may have had a manager before."""
        self._num_queried_tokens, self._num_lost_tokens = num_queried_tokens, _read_lost(stats)

    def advise(self, stats: CacheStats, num_queried_tokens: int) -> str | None:
        """Return a sentence on the pool that lost most of the prompt tokens since the last call, or None."""
        lost = _read_lost(stats)
        num_tokens = num_queried_tokens - self._num_queried_tokens
        new = {name: num_lost - self._num_lost_tokens[name] for name, num_lost in lost.items()}
        self._num_queried_tokens, self._num_lost_tokens = num_queried_tokens, lost
        binding = max(new, key=lambda name: new[name])
        if num_tokens <= 0 or new[binding] < LEAST_SHARE * num_tokens:
            return None
        others = ", ".join(f"{name} {num_lost / num_tokens:.1%}" for name, num_lost in new.items() if name != binding)
        share = f"{new[binding] / num_tokens:.1%} of {num_tokens:,} prompt tokens"
        return f"{binding} binds: {share} since the last advice would have hit with more of its pages; {others}"


def _read_lost(stats: CacheStats) -> dict[str, int]:
    return {name: pool.num_lost_hit_tokens for name, pool in stats.pools.items()}
