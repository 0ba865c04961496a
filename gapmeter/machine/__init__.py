"""The machine and the load tester themselves: doctor and calibration."""
