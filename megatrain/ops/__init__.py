"""The operations that training spends its time in, one file each, written with plain torch on every device."""
