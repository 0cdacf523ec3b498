"""Which branch an objective's targets come from."""

from __future__ import annotations

TARGETS = ("momentum", "stop_gradient", "weight_sharing")
COLLAPSE = "with gradient in both branches and no negative samples all embeddings become one"


def require_target(name: str, target: str, collapses: bool) -> None:
    """Raises ValueError for an unknown branch, and for shared weights where embeddings collapse then."""
    if target not in TARGETS:
        raise ValueError(f"target {target!r} is unknown; use one of {', '.join(TARGETS)}")
    if target == "weight_sharing" and collapses:
        raise ValueError(f"target 'weight_sharing' is refused for {name}: {COLLAPSE}; use momentum or stop_gradient")
