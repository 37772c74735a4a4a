"""Run as a program: decodes a picture with NVIDIA DALI on each device. Prints why a device cannot, as a JSON object.

It is a separate program because a pipeline of DALI starts threads, and looks for a GPU.
"""

from __future__ import annotations

import json

from megatrain.commands.doctor.dali_report import DALI_MARK
from megatrain.contracts.errors import DataError
from megatrain.data.pictures.decoder import DaliDecoder
from megatrain.data.pictures.picture_format import DEVICES


def problem_of(device: str) -> str:
    """Return why DALI cannot decode with a device; empty if it can."""
    try:
        DaliDecoder(device)
    except DataError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    print(f"{DALI_MARK}{json.dumps({device: problem_of(device) for device in DEVICES})}")
