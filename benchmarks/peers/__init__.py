"""Algorithms of other systems, to compare with: each as its paper prints it."""
