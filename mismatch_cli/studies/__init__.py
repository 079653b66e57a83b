"""Traces or runs in, a typed result out: all computation, independent of pictures, terminals and
flags.
"""
