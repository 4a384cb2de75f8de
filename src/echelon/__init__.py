"""Echelon trains PyTorch models on many workers; one flag says how strictly they wait for each other."""

__version__ = "0.1.0"
