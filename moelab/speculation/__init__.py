"""Several tokens for one pass: exact rollback, drafts, and when they pay."""
