"""Headers of every response, including refusals of the HTTP parser. They restrict what a browser may do with the pages.

Nothing is loaded from other origins, no inline code runs, and no other page may frame or read these pages. The opener
policy is not same-origin, because the page opens Perfetto and sends it a trace.
"""

from __future__ import annotations

CONTENT_SECURITY_POLICY = "; ".join([
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self' data: blob:",
    "connect-src 'self'",
    "font-src 'self'",
    "worker-src 'self'",
    "manifest-src 'self'",
    "frame-ancestors 'none'",
    "base-uri 'none'",
    "form-action 'self'",
])  # fmt: skip
_FEATURES = ("accelerometer", "camera", "display-capture", "geolocation", "gyroscope", "microphone", "payment", "usb")

NO_STORE = "no-store"
IMMUTABLE = "public, max-age=31536000, immutable"
"""For files whose name contains the hash of their content."""

SECURITY_HEADERS: tuple[tuple[bytes, bytes], ...] = tuple(
    (name.encode(), value.encode())
    for name, value in (
        ("content-security-policy", CONTENT_SECURITY_POLICY),
        ("x-content-type-options", "nosniff"),
        ("x-frame-options", "DENY"),
        ("referrer-policy", "no-referrer"),
        ("permissions-policy", ", ".join(f"{feature}=()" for feature in _FEATURES)),
        ("cross-origin-resource-policy", "same-origin"),
        ("cross-origin-opener-policy", "same-origin-allow-popups"),
    )
)
_NAMES = frozenset(name for name, _ in SECURITY_HEADERS)

Headers = list[tuple[bytes, bytes]]


def secured(headers: Headers) -> Headers:
    """Return the headers of a response with the security headers; without its own cache-control it gets no-store."""
    kept = [(name, value) for name, value in headers if name.lower() not in _NAMES and name.lower() != b"server"]
    if all(name.lower() != b"cache-control" for name, _ in kept):
        kept.append((b"cache-control", NO_STORE.encode()))
    return [*kept, *SECURITY_HEADERS]
