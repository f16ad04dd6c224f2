"""Reports on recorded runs: an HTML page, plots and Prometheus metrics."""
