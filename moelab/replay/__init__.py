"""Predictions from a recorded routing, without running the model."""
