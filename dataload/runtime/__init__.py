"""What every package builds on: memory budgets, counters, threads, forks, file maps. No torch, no Arrow."""
