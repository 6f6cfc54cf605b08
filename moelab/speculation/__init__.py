"""Several tokens for one pass of the target, with the target's own text.

``generate`` decodes: ``policy`` says how many tokens to draft, ``drafts``, ``dflash`` and ``mtp``
guess, ``sampling`` chooses as the target does, ``rollback`` and ``recurrence`` take guesses back.
"""
