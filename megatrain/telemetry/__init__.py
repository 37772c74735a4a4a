"""What a rank measures about itself: spans, their black box, device timers, FLOPs and MFU."""
