"""Run an mlx-lm model with its experts on disk.

The way of an expert's bytes, one module for each step:

    checkpoint/, experts.py      where the bytes of every expert lie in the files
    streaming/reading/           reads them, several at once, and checks what arrived
    streaming/slots.py           which expert is in which slot, the memory of the slots, eviction
    streaming/layers.py          the MoE layer of each mode, which reads what it misses and computes
    streaming/prefetch.py        reads before the layer is called
    streaming/session.py         what all layers share: reader, lock, counters
    streaming/build.py           mlx-lm's model with the top-k and the type that were asked for
    streaming/model.py           ``load`` puts the layers into the model

Beside them: config.py (``StreamConfig``), footprint.py (memory before loading), cuda.py (bytes by
the GPU's copy engine), trace.py and record.py (which experts were chosen).
"""
