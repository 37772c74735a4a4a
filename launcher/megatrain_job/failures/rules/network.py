"""Networks: NCCL's transports, InfiniBand verbs, gloo, TCP stores, MPI and UCX.

A transport's own message about a path is a possible cause. A connection that the peer closed is a consequence,
unless no other line explains the failure.
"""

from __future__ import annotations

from megatrain_job.failures.rule import LINK, LOST_PEER, Rule, rule
from megatrain_job.failures.verdict import Label

_ADDRESS = r"\b(?P<peer>(?:\d{1,3}\.){3}\d{1,3})"
_TO_PEER = r"(?:\bpeer|\bfrom|\bto|\bremote(?:=| address)?|\baddr(?:ess)?)\W{0,3}" + _ADDRESS

RULES: tuple[Rule, ...] = (
    rule(
        "ib-completion-error", Label.NETWORK, LINK,
        "got completion & with error", "got completion & status=", "net/ib & with status=",
        "local qp operation err", "ibv_wc_retry_exc_err", "ibv_wc_rnr_retry", "transport retry counter exceeded",
        "ibv_wc_ & _err", "rdma & completion & error", "work completion error", "retry exceeded & qp",
        unless=r"status=0\b", culprit=_TO_PEER,
    ),
    rule(
        "ib-link", Label.NETWORK, LINK,
        "net/ib & async fatal event", "net/ib & port error", "net/ib & link down", "net/ib & async event",
        "ibv_event_port_err", "ibv_event_qp_fatal", "ibv_event_device_fatal", "ib_event & port", "link is down",
        "link status definitely down", "link down & mlx", "nic link is down", "lost carrier", "link_downed",
        "port & state changed to down", "carrier lost", "nic link down", "no route to host & giving up",
        "network is down", "enetdown", "enetunreach", "mlx & health compromised",
        "health compromised - reached miss count", "mlx & command timeout", "mlx & hw error", "mlx & fatal error",
        "mlx_core & internal error", "bond & no active slave", "all links down", "rx errors & exceeded",
        "link flap", "local catastrophic error", "no active ib port", "port_inactive", "port is not active",
        unless=r"link_downed\W+0\b",
    ),
    rule(
        "ib-call-failed", Label.NETWORK, LINK,
        "call to ibv_ & failed", "ibv_modify_qp failed", "ibv_reg_mr & failed", "ibv_create_qp & failed",
        "ibv_poll_cq & fail", "ibv_create_cq & fail", "ibv_open_device & fail", "rdma_resolve_addr",
        "rdma_resolve_route", "net/ofi & error", "net/ofi & fail", "fi_cq_readerr", "libfabric & error",
        "efa & unresponsive", "net/ofi & unresponsive", "unreachable remote", "net/ib & unable to", "ucx  error",
        "ucx error", "uct_ib & error", "uct_tcp & fail", "ucp_ep & unreachable", "endpoint timeout & ucx",
        "endpoint is unreachable", "net/socket & fail", "gdrcopy & failed & register",
        "local access violation work queue error",
        unless=r"\b(?:using|falling back|fallback|disabled|disabling)", culprit=_TO_PEER,
    ),
    rule(
        "nccl-connect-exhausted", Label.NETWORK, LINK,
        "socketpollconnect & retrying (", "socketstartconnect & retrying (", "retrying (",
        pattern=r"NCCL.*(?:refused|no route|timed out|unreachable|reset).*retrying \((?P<n>\d+)/(?P=n)\)",
    ),
    rule(
        "nccl-connect-failed", Label.NETWORK, LINK,
        "nccl warn & connect to & failed", "socketstartconnect: connect to & failed", "exceeded error retry count",
        "exceeded retries", "exceeded timeout retry count", "socketpollconnect: connect to & failed",
        "socketpollconnect & returned & exceeded", "call to connect & failed & nccl", "nccl warn net & timed out",
        "nccl warn bootstrap & no socket interface", "no socket interface found",
        "could not find any socket interface", "bootstrap : no socket interface", "nccl warn & bad connection",
        "connect to & failed : no route", "connect & failed : connection refused",
        "connect & failed : network is unreachable", "unexpected remote & socketaccept",
        "nccl warn & no route to host", "nccl warn & connection timed out", "nccl warn & connection refused",
        "socketpollconnect & getsockopt",
        culprit=r"connect(?:ion)? to (?P<peer>[0-9a-f.:%\w]+?)(?:<\d+>)? *(?:\([^)]*\) *)?(?:failed|returned)",
    ),
    rule(
        "nccl-recv-failed", Label.NETWORK, LINK,
        "nccl warn & call to recv", "nccl warn & call to send", "socketprogressopt: call to",
        "nccl & net : call to", "nccl warn & connection reset", "nccl warn & broken pipe",
        unless=r"closed by remote peer",
        culprit=r"(?:from|to|peer) (?P<peer>[\w.:%-]+?)<\d+>",
    ),
    rule(
        "nccl-remote-error", Label.NETWORK, LOST_PEER,
        "ncclremoteerror", "remote process exited or there was a network error", "nccl_remote_error",
        "network error or a remote process exiting", "socket connection closed by remote peer",
    ),
    rule(
        "nccl-closed-by-peer", Label.NETWORK, LOST_PEER,
        "connection closed by remote peer", "nccl warn & remote peer & exited",
        culprit=r"(?:from|to|peer) (?P<peer>[\w.:%-]+?)<\d+>", is_cascade=True,
    ),
    rule(
        "nccl-system-error", Label.NETWORK, LOST_PEER,
        "ncclsystemerror", "unhandled system error",
    ),
    rule(
        "gloo-connect", Label.NETWORK, LINK,
        "gloo connectfullmesh failed", "gloo & connect timeout", "gloo & connection refused",
        "gloo & no route to host", "gloo & unable to find address", "gloo & unable to resolve",
        "gloo & connect: timed out", "gloo & unable to find interface", "gloo & timed out connecting",
        culprit=r"\b(?:SO_ERROR|peer|remote|to)\b.*?" + _ADDRESS,
    ),
    rule(
        "gloo-closed-by-peer", Label.NETWORK, LOST_PEER,
        "connection closed by peer", "gloo & connection reset by peer", "gloo & broken pipe", "gloo::ioexception",
        "gloo & read error", "gloo & write error", "gloo & connection aborted",
        culprit=r"\bpeer\b\W*" + _ADDRESS,
        is_cascade=True,
    ),
    rule(
        "store-lost", Label.NETWORK, LOST_PEER,
        "tcpstore & recvvalue failed", "tcpstore & sendbytes failed", "tcpstore & connection reset",
        "tcpstore & broken pipe", "recvvalue failed on socketimpl", "sendbytes failed on socketimpl",
        "socket.cpp & broken pipe", "socketimpl & connection reset by peer", "socketimpl & broken pipe",
        "failed to recv, got", "failed to check the & should dump", "tcpstore server has shut down",
        "failed to check whether other ranks & store", "store might have been closed", "c10d store & connection",
        "heartbeatmonitor & tcpstore", "heartbeat monitor & tcpstore", "distnetworkerror: failed to recv",
        "connection was likely closed", "rendezvousconnectionerror", "connection to the c10d store has failed",
        "rendezvousclosederror", "rendezvousgracefulexiterror",
        is_cascade=True, names_own_rank=False,
    ),
    rule(
        "store-unreachable", Label.NETWORK, LINK,
        "the client socket has failed to connect", "the client socket has timed out",
        "client socket has timed out after", "socket timeout & tcpstore", "distnetworkerror: the client socket",
        "failed to connect to & tcpstore", "temporary failure in name resolution", "name or service not known",
        "getaddrinfo failed", "could not resolve host", "nodename nor servname", "no route to host & error",
        "errno & no route to host", "errno & network is unreachable", "connection timed out & errno",
        "ssh: connect to host", "no address associated with hostname", "host is unreachable",
        culprit=r"(?:connect to(?: host)?|timed out .*to|resolve host:?) *\(?\[?(?P<peer>[\w.-]+)",
    ),
    rule(
        "address-in-use", Label.USER_CODE, LINK,
        "eaddrinuse", "address already in use",
        unless=r"\b(?:retry|trying|another port|next port)",
    ),
    rule(
        "nccl-peer-error", Label.NETWORK, LOST_PEER,
        "nccl & error from peer", "peer & nccl communicator & aborted", "received abort signal from peer",
        "remote side & closed & nccl", "remote peer & failed",
        is_cascade=True,
    ),
    rule(
        "mpi-lost-peer", Label.NETWORK, LOST_PEER,
        "orte has lost communication", "prte has lost communication", "lost communication with a remote daemon",
        "btl_tcp & connection reset", "btl_tcp & failed", "mca_btl & unreachable", "mca_btl_tcp & unexpected",
        "mca_btl_tcp & fail", "pmix & lost-connection", "pml_ucx & error", "horovodinternalerror",
        "horovod & one or more ranks & lost",
        is_cascade=True,
    ),
    rule(
        "remote-service-lost", Label.NETWORK, LOST_PEER,
        "remotedisconnected", "remote end closed connection", "max retries exceeded with url", "newconnectionerror",
        "connecttimeout", "requests.exceptions.connectionerror", "urlopen error",
        unless=r"\b(?:retrying|will retry|reconnect)|s3|amazonaws|storage\.googleapis",
    ),
    rule(
        "lost-connection", Label.NETWORK, LOST_PEER,
        "connectionreseterror", "brokenpipeerror", "connectionabortederror", "connectionrefusederror",
        "connection reset by peer", "errno & broken pipe", "recv & eof & peer", "software caused connection abort",
        "transport endpoint & not connected & socket", "peer & unreachable", "broken pipe & sendbytes",
        unless=r"\b(?:retrying|will retry|reconnect)", culprit=_TO_PEER,
        is_cascade=True,
    ),
)  # fmt: skip
