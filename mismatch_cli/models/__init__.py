"""The two programs that hold the weights: engines sample, scoring computes log π and gradients."""
