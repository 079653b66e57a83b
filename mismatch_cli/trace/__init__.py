"""The trace format, the source of every number and plot: a folder of Parquet shards with a
manifest.
"""
