"""This machine as a cluster: a job is a keeper process in a session of its own."""
