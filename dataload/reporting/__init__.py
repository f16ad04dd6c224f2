"""What was written down of a run, as a page, a picture or metrics."""
