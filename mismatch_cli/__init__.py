"""Measure the gap between the rollout engine and the trainer of a language model in reinforcement learning."""

__version__ = "0.1.0"
