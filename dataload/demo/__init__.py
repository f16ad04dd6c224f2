"""`dataload demo`: the whole path on this machine, from an S3 server to a trained model."""
