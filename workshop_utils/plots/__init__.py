"""Figures of the workshop: `style` is how they all look, and each subject has a module of its own.

`python -m workshop_utils.plots.draw` redraws everything in images/.
"""
