"""The systems that are measured, one file each, and how one is opened."""
