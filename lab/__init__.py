"""What measures the product rather than belongs to it: benchmarks, fuzzing, evidence, and the makers
of the sample data.
"""

import os

# The command lines of the laboratory type keys that have no flag like flags, as our own processes do
os.environ.setdefault("MISMATCH_CLI_WRITTEN", "1")
