"""Planner: costs of modules on a cluster, ways to share ranks, and the fastest layouts by simulation."""
