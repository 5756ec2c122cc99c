"""In which order a step's work runs."""
