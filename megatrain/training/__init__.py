"""The parts of a run: a worker from start to end, its part of the model, the step loop, and the observers of the steps.

Read `worker.py`, then `step_loop.py`: they contain the order, and every other module contains one part.
"""
