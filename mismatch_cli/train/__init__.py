"""The training loop: learning from rollouts with any algorithm of the table."""
