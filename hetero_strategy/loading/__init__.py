"""Batches ahead of need: what a rank computes, made by workers, dispatched between ranks, copied to the device."""
