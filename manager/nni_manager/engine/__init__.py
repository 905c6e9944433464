"""The event loop of one experiment: events → domain → effects, and the recovery after a restart."""
