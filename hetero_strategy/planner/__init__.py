"""Which layouts: what layers cost, where stages begin, how many stages each module has."""
