"""torchrun's variables: the accepted values, and those that are refused before any process is started with them."""

from __future__ import annotations

import pytest

from megatrain.contracts.errors import TopologyError
from megatrain.contracts.process import Process, process_from_environment

GOOD = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def test_alone_without_a_launcher() -> None:
    assert process_from_environment({"MASTER_ADDR": "node-0"}) == Process()


def test_rank_is_read_from_the_environment_of_torchrun() -> None:
    assert process_from_environment(GOOD) == Process(5, 8, 1, 4, 2, "env://", "node-0:29500", is_round_common=False)


def test_a_launcher_of_ours_names_the_host() -> None:
    assert process_from_environment(GOOD).host == ""
    assert process_from_environment(GOOD | {"MEGATRAIN_HOST": "host-3"}).host == "host-3"


def test_round_number_is_the_same_on_all_ranks() -> None:
    for reason, known in {
        "our launcher counts for all": {"MEGATRAIN_ROUND": "7"},
        "one agent has all workers": {"LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8"},
        "no count": {"TORCHELASTIC_RESTART_COUNT": ""},
    }.items():
        assert process_from_environment(GOOD | known).is_round_common, reason


def test_round_number_comes_from_our_rendezvous() -> None:
    environment = GOOD | {"TORCHELASTIC_RESTART_COUNT": "1"}
    assert process_from_environment(environment | {"MEGATRAIN_ROUND": "7"}).round == 7
    assert process_from_environment(environment | {"MEGATRAIN_ROUND": ""}).round == 1
    counted = {"MEGATRAIN_ROUND": "7", "MEGATRAIN_ROUND_COUNTER": "1484"}
    assert process_from_environment(environment | counted).round_counter == "1484"
    assert process_from_environment(environment | counted | {"MEGATRAIN_ROUND": ""}).round_counter == ""
    with pytest.raises(TopologyError, match="MEGATRAIN_ROUND='x'"):
        process_from_environment(environment | {"MEGATRAIN_ROUND": "x"})


def test_optional_variables_of_torchrun() -> None:
    environment = {key: value for key, value in GOOD.items() if key not in ("LOCAL_WORLD_SIZE",)}
    assert process_from_environment(environment | {"TORCHELASTIC_RESTART_COUNT": ""}).local_world_size == 2


def test_impossible_value_of_a_variable_is_named() -> None:
    for name, value in [
        ("RANK", "8"),
        ("RANK", "-1"),
        ("RANK", "one"),
        ("RANK", "\u0665"),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "-2"),
        ("WORLD_SIZE", "9" * 5000),
        ("LOCAL_RANK", "8"),
        ("LOCAL_WORLD_SIZE", "1"),
        ("LOCAL_WORLD_SIZE", "0"),
        ("MASTER_PORT", "abc"),
        ("MASTER_PORT", "99999"),
        ("TORCHELASTIC_RESTART_COUNT", "-1"),
    ]:
        rule = rf"^environment variable {name}='.*' must be a whole number from \d+ to \d+; "
        with pytest.raises(TopologyError, match=rule):
            raise AssertionError(f"{name}={value} is accepted: {process_from_environment(GOOD | {name: value})}")


def test_half_an_environment_is_refused() -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        with pytest.raises(TopologyError, match=rf"but not {name}; start workers with torchrun"):
            process_from_environment({key: value for key, value in GOOD.items() if key != name})
