"""Measurements, one module for each question: records with types, ``measure``, the command.

Nothing is drawn here: what a notebook shows of a record is in ``lab.figures``.
"""
