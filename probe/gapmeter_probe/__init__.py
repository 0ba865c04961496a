"""gapmeter's probe: binary records of what happens inside a server process. Standard library only.

The package is idle until the environment variable ``GAPMETER_PROBE_DIR`` names a folder to write into.
"""
