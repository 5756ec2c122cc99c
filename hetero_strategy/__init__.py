"""A Lightning strategy in which every module of a multimodal model has its own parallel layout and its own ranks."""
