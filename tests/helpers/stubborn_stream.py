"""A program that opens a stream to a daemon and then ignores all messages of the daemon."""

from __future__ import annotations

import sys
import threading

from megatrain.contracts.records.diag_records import DaemonRecord
from megatrain.contracts.records.record import decode
from megatrain_diagnostics.wire.authentication import SenderName
from megatrain_diagnostics.wire.connection import DaemonConnection

record = decode(DaemonRecord, sys.argv[1], "argument")
connection = DaemonConnection(record, SenderName("stubborn", "life"), lambda answer: None, lambda: None)
print("streaming", flush=True)
threading.Event().wait()
