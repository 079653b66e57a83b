"""Dumps of other programs → a trace. A file per format; `_driver.py` writes the trace, other helpers read and check."""
