"""What every claim of speed is measured with: an S3-shaped origin, workloads, the systems side by side, the report."""
