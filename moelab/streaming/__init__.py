"""Run an mlx-lm model with its experts on disk.

An expert's bytes go this way, with one module for each step:

    checkpoint/, experts.py     find where the bytes of the experts lie in the files
    streaming/reading/          reads them, several at once, and checks what arrived
    streaming/residency/        decides which experts are in memory: slots, eviction, reading ahead
    streaming/layers.py         the MoE layer: asks for the experts of a call, computes with them
    streaming/session.py        runs a loaded model's calls: threads take turns, errors do no harm
    streaming/model.py          ``load`` puts the layers into mlx-lm's model

Before loading, facts.py asks the model once what it is made of (``ModelFacts``), and plan.py
chooses the number of slots; room.py gives slots back where memory gets short. cuda.py moves
routing to the host. Beside these: config.py (``StreamConfig``), build.py (mlx-lm's model with the
top-k and the type that were asked for, and what a new family needs), counters.py, fused.py (gate
and up in one projection), disk_embedding.py (tables of which a token needs a few rows), prefetch.py
(guesses), ranks.py (several machines), trace.py and record.py (which experts were chosen).
"""
