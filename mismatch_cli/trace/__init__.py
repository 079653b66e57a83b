"""The one file format: a folder of Parquet shards with a manifest, from which every number and plot is read."""
