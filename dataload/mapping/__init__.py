"""Preprocessing of a dataset by the user's function, once per row group: `Dataset.map`."""
