"""Mixtures of datasets: one order by weights over the rows of all sources."""

from dataload.mixture.mixture import Mixture, mix

__all__ = ["Mixture", "mix"]
