"""Benchmarks of layers and networks: ``minidl bench``."""
