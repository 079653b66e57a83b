"""Learning from rollouts with any algorithm of the table: what one optimiser step is made of."""
