"""OpenPAI on one machine: jobs of its protocol run as processes, under its rules. `cluster.Cluster` is the way in."""
