"""Who computes what: balancing, packing, reordering, and the step plan they come to."""
