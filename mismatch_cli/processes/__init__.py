"""Other processes: workers that share a reading, ranks that share a model, and a child that
cannot hang us.
"""
