"""Measurements of text."""
