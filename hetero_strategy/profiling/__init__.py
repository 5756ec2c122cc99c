"""What modules cost here: seconds of blocks and links on a device, activations on tensors without values."""
