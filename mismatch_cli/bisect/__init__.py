"""Find which setting, layer or side causes the gap, by experiments on the fixed tokens of a
trace.
"""
