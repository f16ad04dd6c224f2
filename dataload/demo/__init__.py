"""`dataload demo`: the whole data path on one machine, from an S3 server to a trained model."""
