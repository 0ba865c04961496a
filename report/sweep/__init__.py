"""What a sweep shows."""
