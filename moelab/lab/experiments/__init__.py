"""Measurements, one module for each question; what notebooks and commands call."""
