"""Measurements of a rank by itself: spans, their black box, device timers, FLOPs and MFU."""
