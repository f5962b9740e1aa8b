"""How fast bulk may flow, so that the pipeline's messages do not queue behind it: a token bucket, pure arithmetic."""

from __future__ import annotations

import math


class TokenBucket:
    """Lets `rate_bits_per_second` pass on average and at most `burst_bytes` at once.

    Time is given by the caller, in seconds of any monotonic clock.

    Args:
        rate_bits_per_second: None lets everything pass.
        burst_bytes: what may be sent at once after a rest.
    """

    def __init__(self, rate_bits_per_second: float | None, burst_bytes: int, now: float):
        self.rate_bytes_per_second = math.inf if rate_bits_per_second is None else rate_bits_per_second / 8
        self.burst_bytes = burst_bytes
        self._tokens_bytes = float(burst_bytes)
        self._filled_at = now

    def wait_seconds(self, size_bytes: int, now: float) -> float:
        """Until `size_bytes`, at most `burst_bytes`, may be sent; 0 when they may at once."""
        if math.isinf(self.rate_bytes_per_second):
            return 0.0
        self._fill(now)
        return max(0.0, (size_bytes - self._tokens_bytes) / self.rate_bytes_per_second)

    def spend(self, size_bytes: int, now: float) -> None:
        """Accounts for bytes that were sent, allowed or not (urgent ones are not asked about): later ones pay."""
        if math.isfinite(self.rate_bytes_per_second):
            self._fill(now)
            self._tokens_bytes -= size_bytes

    def _fill(self, now: float) -> None:
        earned = (now - self._filled_at) * self.rate_bytes_per_second
        self._tokens_bytes = min(self.burst_bytes, self._tokens_bytes + earned)
        self._filled_at = now
