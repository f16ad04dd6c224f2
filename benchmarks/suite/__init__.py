"""The suite behind `dataload bench`: the share of a job's time in which its accelerators compute."""
