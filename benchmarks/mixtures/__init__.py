"""Mixtures of datasets beside other libraries."""
