"""Algorithms of published systems, one file a paper; importing a file registers its names."""
