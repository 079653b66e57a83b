"""What measures the product rather than belongs to it: benchmarks, fuzzing, evidence, and the makers
of the sample data.
"""
