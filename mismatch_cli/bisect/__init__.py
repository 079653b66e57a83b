"""Find which setting, layer or side causes the gap, by experiments on the fixed tokens of a
trace.
"""

SEARCH_FILE = "search.json"  # the experiments of a search, in its run folder
