"""Traces token by token: numbers over all of their tokens, and some passages with every column.

A page repeats no formula: each algorithm's own masks are applied here, once per slider position. A
token is blocked at positions below its level, so a script only compares two integers, and agrees to
the token.
"""
