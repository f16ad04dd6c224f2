"""The tier on a local disk."""
