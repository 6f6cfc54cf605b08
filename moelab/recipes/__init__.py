"""How everything in ``data/`` was made, runnable again."""
