"""Measurements of modules: seconds of blocks and links on a device, activations on tensors without values."""
