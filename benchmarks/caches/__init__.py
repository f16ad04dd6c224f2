"""Measurements of the cache."""
