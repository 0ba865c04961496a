"""Figures with their intervals, for values that are not independent: a ``Series`` gives an ``Estimate``.

Intervals are made here, but for those of a capacity (capacity.curve) and of costs (compare.cost_table);
docs/how-it-measures.md has the table of all.
"""
