"""Run an mlx-lm model with its experts on disk.

An expert's bytes go this way, with one module for each step:

    checkpoint/, experts.py     find where the bytes of the experts lie in the files
    streaming/reading/          reads them, several at once, and checks what arrived
    streaming/residency/        decides which experts are in memory: slots, eviction, reading ahead
    streaming/layers.py         the MoE layer: asks for the experts of a call, computes with them
    streaming/session.py        runs a model's calls in turn; after an error the next call works
    streaming/model.py          ``load`` puts the layers into mlx-lm's model

Before loading, facts.py finds what a model is made of (``ModelFacts``), and plan.py chooses the
number of slots. Later room.py gives slots back to the system when memory gets short. cuda.py moves
a layer's routing from a GPU to the host. Further modules: config.py (``StreamConfig``), build.py
(builds mlx-lm's model; says how to add a family), counters.py (what calls cost), fused.py (gate and
up in one projection), disk_embedding.py (embedding tables that stay on disk), prefetch.py (guesses
of experts), ranks.py (several machines), trace.py and record.py (which experts were chosen).
"""
