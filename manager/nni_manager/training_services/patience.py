"""How long a cluster that does not answer is asked again."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Patience:
    """How often a call is made, how long is waited between two, to connect, and between two bytes of an answer.

    Gateways give up after 60 s themselves; five tries outlast the restart of a cluster's service.
    """

    tries: int = 5
    first_s: float = 0.5
    longest_s: float = 20.0
    connect_within_s: float = 5.0
    answer_within_s: float = 30.0

    def delay_s(self, failures: int, asked_s: float | None) -> float:
        """After so many failures; `asked_s` is what the server wants, if it says so."""
        own: float = self.first_s * 2 ** (failures - 1)
        return min(max(own, asked_s or 0.0), self.longest_s)
