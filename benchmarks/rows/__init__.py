"""Measurements of rows of certain types."""
