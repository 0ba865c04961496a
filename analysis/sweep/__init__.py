"""Many runs of one scenario at different points: read, put side by side. Needs the folder and nothing else."""
