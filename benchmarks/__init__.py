"""Benchmarks: an S3-compatible origin, workloads, several systems side by side, and reports."""
