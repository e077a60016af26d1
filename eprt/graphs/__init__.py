"""CUDA graphs of a whole step (`StepGraphs`), or of one layer (`LayerGraphs`), for sizes that all ranks share."""

from __future__ import annotations

from eprt.graphs.layer import LayerGraphs
from eprt.graphs.step import StepGraphs

__all__ = ["LayerGraphs", "StepGraphs"]
