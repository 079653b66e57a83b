"""Which setting, which tensor, which module makes the gap: experiments on the recorded tokens."""
