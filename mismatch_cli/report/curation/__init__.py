"""The report of `curate`: which problems were kept, and how good they are on held-out samples."""
