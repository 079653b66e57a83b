"""Takes a model apart: its modules by kind, how a pass calls them, and what flows between its
layers.
"""
