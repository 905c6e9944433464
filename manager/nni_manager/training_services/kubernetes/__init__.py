"""Access to any Kubernetes cluster, for the training services that run jobs there.

`api.Kubernetes` makes the calls, `watch.Watch` reports changes, `preflight` reports missing capabilities. The official client
is an optional extra; it and its errors are not visible outside this package.
"""
