"""The highest rate of arrivals at which every SLO holds: an estimate by a queue's curve, and a rate surely held.

Values in, the next rate or the answer out; ``read`` and ``build`` alone read a folder. Who runs the trials is an
``Oracle`` (trial.py).
"""
