"""Several tokens for one pass of the target, with the target's own text.

generate     the decode loop: ``speculative_generate``, ``speculative_generate_step``
drafts       the ``Draft`` protocol, a model and a lookup as drafts
dflash       block drafts in z-lab's format
sampling     the target's choice, and whether a draft agrees with it
policy       how many tokens to draft
rollback     take rejected tokens back out of a cache
recurrence   the states of recurrent layers after fewer tokens
gated_delta_cuda  a CUDA kernel for one of these recurrences
target       what all this needs of the target
"""
