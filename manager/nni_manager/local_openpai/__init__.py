"""A local implementation of OpenPAI that runs jobs as processes of one machine. Entry point: `cluster.Cluster`."""
