"""Which files and row groups a dataset has: listing, footers, partitions, pruning, splits."""
