"""What `clipstats` shows: which tokens each algorithm blocks, as figures."""
