"""Expert-parallel runtime for Mixture-of-Experts inference on torch.distributed."""

__version__ = "0.1.0"
