"""What gapmeter measures about itself: the figures under docs/results, on this machine."""
