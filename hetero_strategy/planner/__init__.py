"""Which layouts: what layers cost and where stages begin."""
