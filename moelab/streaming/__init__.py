"""Run an mlx-lm model with its experts on disk.

The way of an expert's bytes, one module for each step:

    checkpoint/, experts.py     where the bytes of the experts lie in the files
    streaming/reading/          reads them, several at once, and checks what arrived
    streaming/residency/        which experts are in memory: slots, eviction, reading ahead
    streaming/layers.py         the MoE layer: asks for the experts of a call, computes with them
    streaming/session.py        a loaded model's calls: threads take turns, errors leave it usable
    streaming/model.py          ``load`` puts the layers into mlx-lm's model

How many slots there are: plan.py chooses them before loading, room.py gives them back where memory
gets short, and heap.py returns what the C library keeps. On a GPU: gpu/ copies bytes, handover.py
moves the routing to the host. Beside them: config.py (``StreamConfig``), build.py (mlx-lm's model
with the top-k and the type that were asked for), counters.py, footprint.py (memory before
loading), fused.py (gate and up in one projection), prefetch.py (guesses), rungs.py (the modes
without slots), ranks.py and placement.py (several machines), trace.py and record.py (which experts
were chosen).
"""
