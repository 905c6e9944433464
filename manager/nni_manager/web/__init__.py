"""The manager's HTTP server: NNI's REST API and the web page."""
