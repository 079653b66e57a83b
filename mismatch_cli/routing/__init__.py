"""Which experts a mixture of experts sends each token to: taken down, compared, prescribed."""
