"""Adapters to clusters: each renders jobs as data, submits them, and maps the cluster's states and errors to ours."""
