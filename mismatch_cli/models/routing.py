"""Records, compares and prescribes the experts that a mixture of experts sends each token to."""
