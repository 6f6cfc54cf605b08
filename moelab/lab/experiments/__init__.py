"""Measurements, one module for each question; the charts of a notebook stand in its cells."""
