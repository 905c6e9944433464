"""OpenPAI on one machine: jobs of its protocol run as processes, under its rules. Entry point: `cluster.Cluster`."""
