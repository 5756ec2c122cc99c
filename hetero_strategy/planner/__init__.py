"""Which layouts: what modules cost on a cluster, how they can share ranks, and what is fastest by simulation."""
