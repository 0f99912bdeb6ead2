"""Figures of long contexts, experts and pipelines without bubbles."""
