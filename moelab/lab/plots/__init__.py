"""How results are drawn and shown."""
