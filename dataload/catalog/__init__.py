"""The files and row groups of a dataset: listing, footers, partitions, pruning, splits."""
