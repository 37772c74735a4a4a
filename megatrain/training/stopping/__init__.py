"""How a worker stops: the watchdog that kills it, the self-fence, and the warning that a stop takes long."""
