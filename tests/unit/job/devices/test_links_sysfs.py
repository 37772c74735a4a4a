"""Network interfaces and RDMA ports, from directories as the kernel's documentation describes them."""

from __future__ import annotations

from pathlib import Path

from megatrain_job.devices.links import LinkReading, read_links


def write(directory: Path, values: dict[str, object]) -> None:
    for name, value in values.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")


ETHERNET = {
    "operstate": "up", "speed": 100_000, "carrier_changes": 3, "device/vendor": "0x15b3", "statistics/rx_errors": 4,
    "statistics/tx_errors": 5, "statistics/rx_dropped": 6, "statistics/tx_dropped": 7,
}  # fmt: skip
PORT = {
    "state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)", "counters/link_downed": 1,
    "counters/port_rcv_errors": 2, "counters/local_link_integrity_errors": 3, "counters/port_xmit_discards": 4,
    "counters/symbol_error": 5, "counters/link_error_recovery": 6, "hw_counters/out_of_buffer": 7,
    "hw_counters/local_ack_timeout_err": 8, "hw_counters/packet_seq_err": 9,
}  # fmt: skip


def test_counters_of_hardware(tmp_path: Path) -> None:
    write(tmp_path / "class/net/ens1", ETHERNET)
    write(tmp_path / "class/net/docker0", {"operstate": "up", "statistics/rx_errors": 1})
    write(tmp_path / "class/infiniband/mlx5_0/ports/1", PORT)
    assert read_links(tmp_path) == (
        LinkReading("ens1", True, "up", 100_000.0, 3, 4, 5, 6, 7),
        LinkReading("mlx5_0:1", True, "ACTIVE, LinkUp", 400_000.0, 1, 2, 3, 7, 4, 11, 17),
    )


def test_interfaces_without_hardware_count_if_they_are_up(tmp_path: Path) -> None:
    write(tmp_path / "class/net/eth0", {"operstate": "up", "speed": 10_000})
    write(tmp_path / "class/net/tunl0", {"operstate": "down"})
    write(tmp_path / "class/net/lo", {"operstate": "unknown"})
    assert read_links(tmp_path) == (LinkReading("eth0", True, "up", 10_000.0, is_hardware=False),)


def test_value_that_is_not_a_number_is_left_out(tmp_path: Path) -> None:
    write(tmp_path / "class/net/ens1", {**ETHERNET, "speed": -1, "statistics/rx_errors": "N/A"})
    (link,) = read_links(tmp_path)
    assert (link.speed_mbps, link.rx_errors, link.tx_errors) == (None, None, 5)
    assert read_links(tmp_path / "nowhere") == ()
