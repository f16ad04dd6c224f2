"""Predictions of the bytes that epochs fetch (the simulation and the plan), and warming of the cache."""
