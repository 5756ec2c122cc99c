"""Batches ahead of need: workers, the background thread, dispatch, copies to the device."""
