"""Adapters to clusters: each renders jobs as data, submits them, and turns the cluster's words into ours."""
