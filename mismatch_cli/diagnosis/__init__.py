"""What is wrong with a trace, before any numerics: one check a file, each with its evidence, cause and remedy."""
