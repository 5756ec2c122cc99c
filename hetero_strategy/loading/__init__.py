"""Batches ahead of need: made by workers, dispatched between ranks, copied to the device."""
