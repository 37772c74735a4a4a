"""The audit: what was done or asked for, by whom and why."""

from __future__ import annotations

from megatrain_diagnostics.dashboard.answers.document import Document


class AuditEntryDocument(Document):
    """One thing that was done or asked for: by the driver after a verdict, or by a person through this page."""

    at_unix_s: float
    source: str
    """driver, dashboard or command line."""
    actor: str
    action: str
    target: str
    reason: str
    result: str
    entry_hash: str
    """Of dashboard entries; each holds the hash of the one before."""


class AuditDocument(Document):
    """The answer of /audit, the newest first. `chain_problem`: where the chain of hashes breaks, or empty."""

    entries: tuple[AuditEntryDocument, ...]
    chain_problem: str
