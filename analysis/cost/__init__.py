"""What a request costs, in money and in energy."""
