"""Trust regions, weights and algorithms: mathematics on log-probabilities, without files."""
