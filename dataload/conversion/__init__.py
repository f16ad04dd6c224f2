"""Conversion of datasets to Parquet of a good shape: a `Source` has tables, the `Writer` makes files of them."""
