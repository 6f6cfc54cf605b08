"""Predict a token's time without running: from a recorded routing and a machine's costs."""
