"""A rank's measurements of itself: spans, their black box, device timers, FLOPs and MFU."""
