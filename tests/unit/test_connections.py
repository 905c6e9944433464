"""Eviction of connections to the keeper port when the number of connections reaches the limit."""

import contextlib
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nni_manager.grpc_server import connections
from nni_manager.grpc_server.connections import Connections, peer_of


@pytest.mark.parametrize(
    ("uri", "peer"),
    [
        ("ipv4:10.0.0.1:5000", ("10.0.0.1", 5000)),
        ("ipv6:%5B::1%5D:5000", ("::1", 5000)),
        ("ipv6:[fe80::1%25eth0]:5000", ("fe80::1", 5000)),
        ("ipv6:%5B::ffff:10.0.0.1%5D:5000", ("10.0.0.1", 5000)),
        ("unix:/tmp/socket", None),
        ("", None),
    ],
)
def test_a_peer_address_is_parsed_from_the_uri_of_grpc(uri, peer):
    assert peer_of(uri) == peer


@given(st.data())
def test_only_unauthenticated_connections_are_closed_at_the_connection_limit(data):
    connection_table = Connections(80)  # a limit of 80 allows at most 20 unauthenticated connections
    peer = st.tuples(st.sampled_from(["10.0.0.1", "10.0.0.2"]), st.integers(1, 99))
    first_seen, known = {}, {}
    with contextlib.ExitStack() as stack:
        for poll in range(data.draw(st.integers(1, 5))):
            for each in data.draw(st.sets(peer, max_size=5)):
                known.setdefault(
                    each, stack.enter_context(connection_table.authenticated(f"ipv4:{each[0]}:{each[1]}"))
                )
            peers = sorted(data.draw(st.sets(peer, max_size=60)) | known.keys())
            first_seen = {each: first_seen.get(each, poll) for each in peers}
            leaving = connection_table.strangers_to_close(peers)
            staying = set(peers) - set(leaving) - known.keys()
            assert known.keys().isdisjoint(leaving)
            assert len(staying) <= 20
            if leaving:
                assert len(staying) == 5
                hosts = {host for host, _ in known}
                ages = [(each[0] in hosts, first_seen[each]) for each in leaving]
                assert max(ages) <= min((each[0] in hosts, first_seen[each]) for each in staying)


def test_connections_from_the_host_of_a_disconnected_keeper_are_evicted_last():
    connection_table = Connections(8)
    with connection_table.authenticated("ipv4:10.0.0.1:1"), connection_table.authenticated("ipv4:10.0.0.1:1"):
        pass
    unauthenticated = [("10.0.0.1", 1), ("10.0.0.2", 1), ("10.0.0.2", 2)]
    assert connection_table.strangers_to_close(unauthenticated) == [
        ("10.0.0.2", 1),
        ("10.0.0.2", 2),
        ("10.0.0.1", 1),
    ]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_only_connections_of_the_given_port_are_listed_and_closed(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as stack:
        ours, others = (stack.enter_context(socket.create_server((host, 0), family=family)) for _ in range(2))
        peers = []
        for listener in (ours, ours, others):
            peers.append(stack.enter_context(socket.create_connection(listener.getsockname()[:2])))
            stack.enter_context(listener.accept()[0])
        found = list(connections._sockets_at(ours.getsockname()[1]))
        assert sorted(each.peer for each in found) == sorted(peer.getsockname()[:2] for peer in peers[:2])
        # The descriptor of this _Socket belongs to another socket, as after a reuse. So _shut_down() must close nothing.
        first = next(each for each in found if each.peer == peers[0].getsockname()[:2])
        connections._shut_down(connections._Socket(peers[2].fileno(), first.peer))
        connections._shut_down(first)
        assert peers[0].recv(1) == b""
        for peer in peers[1:]:
            peer.sendall(b"x")
