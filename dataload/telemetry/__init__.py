"""Telemetry of a training loop: trace spans, the timeline of waits, statistics and their log."""
