"""Who computes what: data sets, step plans, loaders."""
