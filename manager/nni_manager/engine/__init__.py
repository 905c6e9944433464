"""The loop of one experiment: events → domain → effects, and what to do after a restart."""
