"""What becomes of runs later: lists, SQL, archives, exports, verification."""
