"""The one file format: a folder of Parquet shards with a manifest, which every number, plot and verdict is read from."""
