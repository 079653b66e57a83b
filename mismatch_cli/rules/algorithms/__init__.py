"""Algorithms: their definition, the table of published ones, and parsing of their names."""
