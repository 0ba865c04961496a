"""What several tests need: servers, loads, runs, results, streams, the command, a browser; a module each."""
