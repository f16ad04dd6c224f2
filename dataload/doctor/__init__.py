"""Checks of a machine, a cache folder, an object store and a cluster for common problems."""
