"""What a loop waited for and what it was served: spans, the timeline of waits, statistics and their log."""
