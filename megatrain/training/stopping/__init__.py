"""How a worker stops: the watchdog that ends it, the fence of a frozen executor, the warning that a stop takes long."""
