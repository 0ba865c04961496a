"""One server, one load or several: from a resolved scenario to a finished run's folder."""
