"""What a capacity shows."""
