"""How calls to an unresponsive cluster are retried."""

from nni_manager.support import backoff
from trial_keeper.frozen_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class ClientRetryPolicy:
    """The number of tries, the delays between them, and the timeouts to connect and between two bytes of an answer.

    Gateways time out after 60 s; five tries outlast the restart of a cluster's service.
    """

    tries: int = 5
    first_s: float = 0.5
    longest_s: float = 20.0
    connect_within_s: float = 5.0
    answer_within_s: float = 30.0

    def delay_s(self, failures: int, asked_s: float | None) -> float:
        """Returns the delay after `failures` failures. `asked_s` is the server's Retry-After; None: not given."""
        own_s = backoff.delay_s(failures, self.first_s, self.longest_s)
        return min(max(own_s, asked_s or 0.0), self.longest_s)
