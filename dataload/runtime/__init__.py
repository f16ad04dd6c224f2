"""Base of all packages: memory budgets, counters, threads, forks and file maps. Imports neither torch nor Arrow."""
