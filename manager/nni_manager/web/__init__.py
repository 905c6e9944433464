"""The manager's HTTP side: NNI's REST paths, and later the pages."""
