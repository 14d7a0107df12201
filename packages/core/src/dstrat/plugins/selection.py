"""Choosing between the distributions that offer one alias."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.errors import AmbiguousAliasError
from dstrat.plugins.names import normalized
from dstrat.plugins.offer import THIS_PROCESS, Offer, kind_label
from dstrat.plugins.settings import PREFER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dstrat.plugins.component import Kind


def visible(candidates: Sequence[Offer], preferred: str | None) -> Sequence[Offer]:
    """Return the offers of one alias that stay when registration in this process and the preference are applied."""
    registered = [offer for offer in candidates if offer.owner == THIS_PROCESS]
    return registered or [offer for offer in candidates if normalized(offer.owner) == preferred] or candidates


def choose(kind: Kind, alias: str, candidates: Sequence[Offer], preferred: str | None) -> Offer:
    """Return the one offer that the alias means.

    Args:
        kind: What was looked for.
        alias: What was asked.
        candidates: What is offered under that name, at least one.
        preferred: Normalized name of the distribution that the user prefers for it.

    Raises:
        AmbiguousAliasError: Several distributions offer it and none is preferred, or the preferred one does not.
    """
    left = visible(candidates, preferred)
    if left[0].owner == THIS_PROCESS:
        return left[0]
    asked = f"{kind_label(kind)} {alias!r}"
    if preferred is not None and normalized(left[0].owner) != preferred:
        raise AmbiguousAliasError(
            f"{PREFER} wants {asked} from {preferred}, which does not offer it: it is offered by {_owners(candidates)}"
        )
    if len(left) > 1:
        first = left[0].owner
        raise AmbiguousAliasError(
            f"{asked} is offered by {_owners(candidates)}: write '{alias}@{first}', or set {PREFER}=\"{alias}={first}\""
        )
    return left[0]


def of_owner(kind: Kind, alias: str, owner: str, candidates: Sequence[Offer]) -> Offer | None:
    """Return the offer of one distribution; None where nobody offers the alias at all.

    Raises:
        AmbiguousAliasError: Others offer it, and this distribution does not.
    """
    for offer in candidates:
        if normalized(offer.owner) == normalized(owner):
            return offer
    if not candidates:
        return None
    raise AmbiguousAliasError(
        f"{kind_label(kind)} {alias!r} is not offered by {owner!r}: it is offered by {_owners(candidates)}"
    )


def _owners(candidates: Sequence[Offer]) -> str:
    labels = [offer.owner_label for offer in candidates]
    return " and ".join([", ".join(labels[:-1]), labels[-1]] if labels[1:] else labels)
