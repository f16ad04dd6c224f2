"""What a program that succeeds may write to standard error: progress."""

from __future__ import annotations

import re

PROGRESS = re.compile(
    r"epoch \d+ of \d+: .*% of it waiting.*"
    r"|resumed after step [\d,]+, in epoch \d+ of \d+"
    r"|(warming|converting|reading footers|counting nulls|verifying|evicting): .* to go"
)


def noise(text: str, *expected: str) -> list[str]:
    """Return the lines that are neither progress nor contain one of the expected texts."""
    lines = filter(str.strip, re.split(r"[\r\n]+", text))
    return [line for line in lines if not PROGRESS.fullmatch(line.strip()) and not any(map(line.count, expected))]
