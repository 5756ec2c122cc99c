"""Parallelize one module on its own mesh, and finish its gradients."""
