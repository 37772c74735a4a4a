"""The operations that training spends its time in, one file each. Each has a plain torch form for every device."""
