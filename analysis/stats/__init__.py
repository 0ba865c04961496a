"""Figures with their intervals, for values that are not independent: a ``Series`` gives an ``Estimate``.

Every interval that gapmeter prints is made here; docs/how-it-measures.md has the table of them.
"""
