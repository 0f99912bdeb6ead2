"""Checks of lesson 16, long contexts, experts, no bubbles; see `workshop_utils.lessons.checks`."""
