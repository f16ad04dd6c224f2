"""The measured systems, one module each."""
