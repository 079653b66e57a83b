"""Responses → the trainer's log-probabilities, entropies and ranks, in bounded memory."""
