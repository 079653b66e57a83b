"""Which setting, which layer, which side makes the gap: experiments on the fixed tokens of a trace."""
