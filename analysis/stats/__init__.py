"""Figures with their intervals, for values that are not independent: a ``Series`` gives an ``Estimate``.

Most intervals are made here; those of a knee (sweep.curves), of a capacity (capacity.curve), of costs (cost,
compare.cost_table) and of energy (device.energy) are not. docs/how-it-measures.md has the table of all.
"""
