"""Measurements, one module for each question; a notebook's own cells draw its charts."""
