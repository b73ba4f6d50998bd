"""titan_like: a PyTorch-native trainer for decoder-only language models."""

__version__ = "0.1.0"
