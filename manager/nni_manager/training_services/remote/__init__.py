"""Machines over SSH: each job is a process group on one of the machines, which commands over SSH start, watch and end."""
