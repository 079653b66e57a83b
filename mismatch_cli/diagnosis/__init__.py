"""Finds what is wrong with a trace besides numerics: one check per file, with its evidence,
cause and remedy.
"""
