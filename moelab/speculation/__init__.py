"""Several tokens for one pass of the target, with the target's own text.

``generate`` has the decode loop. It asks a ``policy`` how many tokens to draft, and one of
``drafts`` or ``dflash`` for guesses. ``sampling`` has the target's choices, ``rollback`` takes
rejected guesses back out of a cache, by the states that ``recurrence`` knows.
"""
