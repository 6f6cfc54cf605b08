"""Predict without running: a recorded routing, this machine's costs, and what follows from both."""
