"""What a person sees of a run: while it runs, and in the terminal at its end."""
