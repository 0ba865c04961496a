"""May the figures be believed: validity, the instrument's floor, steady state, drift."""
