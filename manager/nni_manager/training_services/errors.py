"""Errors for a job that a cluster does not accept now but may accept later. Every platform maps its answers to these.

| Answer | Error | Then |
|---|---|---|
| 400, 403, 409 of another's object, 413, 422 | `UserError` | the trial ends with the cluster's message |
| 403 of an exceeded quota | `QuotaExceeded` | the job waits, with that reason |
| 401 | `Unauthenticated` | submission is suspended until a login is valid |
| 408, 429, 5xx, a lost connection | `ClusterUnavailable` | the job is submitted again |
| 409 Conflict | any other `RetryableError` | the job is submitted again |
"""

from nni_manager.errors import RetryableError


class Unauthenticated(RetryableError):
    """cannot log in to the cluster; renew the token or the login"""


class ClusterUnavailable(RetryableError):
    """cannot reach the cluster; check that its services run and its address is correct"""


class QuotaExceeded(RetryableError):
    """cannot submit the job while a quota of the cluster is exceeded; end other jobs, or ask for a larger quota"""
