"""What may be wrong with an answer, by name: as the server's default, or in a request's body as ``"fault": NAME``."""

from __future__ import annotations

# Answered at once, instead of a stream.
AT_ONCE = ("status_500", "status_404", "not_http", "close_unanswered", "silent")
# Happen after half of the tokens.
MIDWAY = ("cut", "reset", "half_event", "garbage", "error_event", "stall")
# Complete answers, told in another way.
FORMS = ("plain", "close_delimited", "split", "close_after", "drop_reused", "trailing", "interim", "uncounted")
FAULTS = ("none", *AT_ONCE, *MIDWAY, *FORMS)
