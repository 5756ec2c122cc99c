"""Scripts that a person reads first: `python -m recipes.train`, `python -m recipes.evaluate`."""
