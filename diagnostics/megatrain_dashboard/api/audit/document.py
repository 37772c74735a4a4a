"""Types of the audit: what was done or requested, by which person or driver, and why."""

from __future__ import annotations

from megatrain_dashboard.responses.document import Document


class AuditEntryDocument(Document):
    """One action that was done or requested: by the driver after a verdict, or by a person through this page."""

    at_unix_s: float
    source: str
    """driver, dashboard or command line."""
    actor: str
    action: str
    target: str
    reason: str
    result: str
    entry_hash: str
    """The hash of an entry of the dashboard; each entry contains the hash of the one before."""


class AuditDocument(Document):
    """The response of /audit, the newest first. `chain_problem`: where the chain of hashes breaks, or empty."""

    entries: tuple[AuditEntryDocument, ...]
    chain_problem: str
