"""What the device did and could do: telemetry, roofline, precision, what binds."""
