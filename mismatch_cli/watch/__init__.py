"""A run that goes on, followed from outside: what has come to it, step by step, and what is on record of that."""
