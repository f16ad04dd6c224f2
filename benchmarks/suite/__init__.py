"""The suite behind `dataload bench`: accelerators kept busy, and the cost of ten epochs."""
