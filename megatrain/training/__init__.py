"""The parts of a run: a worker from start to end, its part of the model, the step loop, and the observers of the steps.

Read `worker.py`, then `step_loop.py`: they define the order of a run, and every other module defines one part of it.
"""
