"""Losses and what else goes along rows of classes."""
