"""The profiles of hypothesis: a nightly run draws new cases each time, a daily run the same and fewer."""

import os

from hypothesis import HealthCheck, settings

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"

# The daily run is deterministic and has no deadline, so that neither load nor chance makes it fail.
settings.register_profile(
    "daily",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("nightly", settings.get_profile("daily"), derandomize=False, max_examples=200)
settings.load_profile("nightly" if NIGHTLY else "daily")
