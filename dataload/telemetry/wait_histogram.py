"""How long a loop waited for each batch: a histogram that is small, cheap to add to, and can be merged over ranks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil

BOUNDS = tuple(10 ** (power / 10 - 6) for power in range(91))  # 1 µs to 1000 s, ten a decade


@dataclass
class WaitHistogram:
    """Counts of waits in buckets with the same bounds everywhere: 1 µs to 1000 s, each 26 % longer than the last.

    Attributes:
        counts: Waits in each bucket. Bucket `i` holds those above `BOUNDS[i - 1]` and up to `BOUNDS[i]`; the first has
            all shorter ones, the last all longer ones.
        longest: The longest wait, in seconds.

    Notes:
        One thread adds, any thread may read.

    Example:
        >>> one, other = WaitHistogram(), WaitHistogram()
        >>> for seconds in (0.001, 0.002, 0.003):
        ...     one.add(seconds)
        >>> other.add(2.5)
        >>> both = WaitHistogram.merged([one, other])
        >>> round(both.quantile(0.5), 4), both.quantile(0.99)
        (0.002, 2.5)
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    longest: float = 0.0

    def add(self, seconds: float) -> None:
        """Count a wait."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        if seconds > self.longest:  # noqa: PLR1730 (max() takes as long as the rest)
            self.longest = seconds

    @classmethod
    def merged(cls, histograms: Iterable[WaitHistogram]) -> WaitHistogram:
        """Return the histogram of all waits of several, such as of all ranks."""
        total = cls()
        for each in histograms:
            total.counts = [count + more for count, more in zip(total.counts, each.counts, strict=True)]
            total.longest = max(total.longest, each.longest)
        return total

    @classmethod
    def largest(cls, histograms: Iterable[WaitHistogram]) -> WaitHistogram:
        """Return the largest counts of several, none of which falls while those only grow."""
        every = [*histograms]
        counts = [max(of_bucket) for of_bucket in zip(*(each.counts for each in every), strict=True)]
        return cls(counts, max(each.longest for each in every))

    def quantile(self, share: float) -> float:
        """Return how long the wait was that `share` of the waits didn't exceed, to within one bucket, in seconds.

        It is the upper bound of the bucket that holds it, or the longest wait if that is shorter; 0 without waits.

        Args:
            share: In (0, 1]; 0.99 for the 99th percentile.
        """
        rank, so_far = ceil(share * sum(self.counts)), 0
        for bound, count in zip(BOUNDS, self.counts, strict=False):
            so_far += count
            if so_far >= rank:
                return min(bound, self.longest)
        return self.longest

    def as_json(self) -> dict[str, object]:
        """Return the histogram as JSON without its empty buckets."""
        return {"counts": {str(bucket): n for bucket, n in enumerate(self.counts) if n}, "longest": self.longest}

    @classmethod
    def from_json(cls, content: Mapping[str, object]) -> WaitHistogram:
        """Return the histogram that `as_json` described.

        Raises:
            ValueError, KeyError, TypeError: It described none.
        """
        counts, longest = content["counts"], content["longest"]
        if not isinstance(counts, dict) or not isinstance(longest, (int, float)) or not 0 <= longest < 1e18:
            raise ValueError("no histogram")
        found = cls(longest=float(longest))
        for bucket, count in counts.items():
            if int(bucket) not in range(len(BOUNDS) + 1) or not isinstance(count, int) or not 0 <= count < 1e18:
                raise ValueError(f"no bucket {bucket!r} with {count!r} waits")
            found.counts[int(bucket)] = count
        return found
