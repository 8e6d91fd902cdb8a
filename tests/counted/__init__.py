"""Layers as counting formulas."""
