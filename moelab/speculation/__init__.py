"""Speculative decoding: one pass of the target gives several tokens, and the text stays the same.

``generate`` decodes. ``policy`` says how many tokens to draft. ``drafts``, ``dflash`` and ``mtp``
guess them. ``sampling`` chooses the target's tokens. ``rollback`` and ``recurrence`` undo guesses.
"""
