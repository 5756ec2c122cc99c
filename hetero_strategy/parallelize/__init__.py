"""How one module is put on its own mesh, and its gradients settled."""
