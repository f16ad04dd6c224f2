"""The machine of a benchmark: its description, and memory that it owns already."""
