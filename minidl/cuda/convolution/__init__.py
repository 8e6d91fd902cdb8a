"""Convolutions: families of kernels, and which of them a layer gets."""
