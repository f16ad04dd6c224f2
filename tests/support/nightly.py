"""Whether this is a long run, that looks at other cases each time, or one of every day, that looks at the same."""

import os

from hypothesis import HealthCheck, settings

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"

# No verdict hangs on a clock or on luck: neither a busy machine nor a rare draw makes the run of every day fail.
settings.register_profile(
    "daily", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("nightly", settings.get_profile("daily"), derandomize=False)
settings.load_profile("nightly" if NIGHTLY else "daily")
