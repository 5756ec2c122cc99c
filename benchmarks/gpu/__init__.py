"""Checks of one GPU, each against a peer or a bound; ``python -m benchmarks.gpu``."""
