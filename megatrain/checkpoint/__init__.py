"""Saving and loading the state of a job as torch distributed checkpoints of boxes under global parameter names."""

from megatrain.checkpoint.store import load_boxes, load_whole, save_boxes

__all__ = ["load_boxes", "load_whole", "save_boxes"]
