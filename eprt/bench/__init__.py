"""Measurements behind `eprt bench`: each module returns rows, the command prints, stores and plots them."""
