"""Measurements, one module for each question: functions that return a table, and the command.

The charts of a notebook stand in its cells; here are only the functions behind its sliders.
"""
