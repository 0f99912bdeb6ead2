"""From what was measured with a few workers to what many would do."""
