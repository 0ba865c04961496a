"""What a run means: ledger, percentiles, validity, verdict. Reads a run's folder and nothing else."""
