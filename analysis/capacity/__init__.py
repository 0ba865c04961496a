"""The highest Poisson rate at which every SLO holds: a search over trials, with an interval that keeps its promise.

Values in, the next rate or the answer out; ``read`` and ``build`` alone read a folder. Who runs the trials is an
``Oracle`` (trial.py).
"""
