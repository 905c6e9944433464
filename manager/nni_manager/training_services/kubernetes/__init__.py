"""Any Kubernetes cluster, as the training services that run jobs there need it: objects in, and all that happens to them out.

`api.Kubernetes` makes the calls, `watch.Watch` tells what changes, `preflight` says what a cluster lacks. Nothing outside knows
the official client, which only an extra brings along, nor its errors.
"""
