"""Hydra configuration: see config.yaml; every field says what it does."""
