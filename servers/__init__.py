"""Who answers: launching real engines as children, serving Transformers, attaching, and the simulated engine."""
