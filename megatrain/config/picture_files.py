"""Section [pictures]: pictures from shards, and the producers that decode them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatrain.config.options import option
from megatrain.peers.link import PeerAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class PicturesConfig:
    """Pictures from shards, with data.pictures="shards", and the producers that decode them."""

    shards: str = option(
        "",
        "Directory of WebDataset shards and their index, which `megatrain data pictures index` makes. Hosts that "
        "run no producers need only the index.",
    )
    decoder: Literal["dali", "dali-mixed", "pillow"] = option(
        "dali",
        "What the producers on each host decode with. dali: NVIDIA DALI on the CPU. dali-mixed: NVIDIA DALI on a "
        "GPU. pillow: Pillow, which is slower. Their pixels differ, so a run cannot change the decoder.",
    )
    producers: int = option(
        1,
        "Producers that are started on each host, beside the ranks, if pictures.addresses is empty.",
        minimum=1,
        maximum=64,
    )
    threads: int = option(1, "Decoding threads of each of these producers.", minimum=1, maximum=1024)
    addresses: str = option(
        "",
        "Addresses of producers that run already (`megatrain data pictures serve`) and are asked instead: "
        '"HOST:PORT, HOST:PORT".',
    )
    secret: str = option("", "File with the secret of the producers at pictures.addresses, on each host.")
    max_pixels: int = option(
        1 << 26,
        "Pictures with more pixels cannot be used. A producer decodes at most this number of pixels at once.",
        unit="pixels",
        minimum=1,
    )

    @property
    def num_producers(self) -> int:
        """How many producers a process asks. Raises: as `peers`."""
        return len(self.peers) or self.producers

    @property
    def peers(self) -> tuple[PeerAddress, ...]:
        """The addresses. Raises: ValueError with the part that is not HOST:PORT."""
        parts = self.addresses.split(",") if self.addresses else ()
        return tuple(PeerAddress.parse(part.strip()) for part in parts)
