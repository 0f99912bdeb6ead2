"""Figures of the workshop: `style` is how they all look, and each subject has a module of its own."""

from workshop_utils import optional

optional.require("lessons")
