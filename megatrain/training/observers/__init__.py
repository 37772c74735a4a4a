"""The observers of steps: timeouts, heartbeat, warnings, values, reports, profiler, garbage collection, memory.

An observer changes nothing that a step computes. `step_observers.py` lists the observers in their order.
"""
