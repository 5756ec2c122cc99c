"""How one module is put on its own mesh, and what becomes of its gradients."""
