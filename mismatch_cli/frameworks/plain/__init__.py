"""Files of no framework: plain JSONL and Parquet."""
