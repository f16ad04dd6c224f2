"""The benchmark of first epochs: `python -m dataload.benchmarks.cold`."""
