"""Percentiles and their intervals, for values that are not independent."""
