"""Where the bytes come from: S3, or any fsspec filesystem."""
