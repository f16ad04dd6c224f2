"""Ranges and files of objects, read in blocks through a tier."""
