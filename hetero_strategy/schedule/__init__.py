"""In which order a step's work runs, and the executor that runs it."""
