"""Plans of steps: who computes what, by balancing, packing and reordering."""
