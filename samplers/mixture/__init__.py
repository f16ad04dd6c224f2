"""The order of a mixture of datasets: a formula from positions to sources and their rows."""
