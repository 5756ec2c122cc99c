"""Runs steps: the executor, gradients of a step, what it yields, and when each action ran."""
