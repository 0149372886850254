"""Describes who sends a request."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.server.access.accounts import Account
from penstock.store import DerivedModel

KNOWN = ("key ", "tenant ")  # owners that a key or a trusted proxy names begin so
UNNAMED = "unnamed tenant"  # the owner of requests that a trusted proxy does not name


def owner_of_key(name: str) -> str:
    return f"key {name}"


@dataclass(slots=True, kw_only=True)
class Caller:
    """Knows who asks, as far as keys or a trusted proxy tell."""

    owner: str = ""  # an explanation mentions recent prompts of the same owner only
    page: str = ""  # describes the foreign web page that the request comes from, if it does
    anonymous: bool = False  # without the key that other requests need: it gets the answers of probes only
    payer: Account | None = None  # the API key's account that is charged
    tenants: bool = False  # a trusted proxy names tenants

    @property
    def tenant(self) -> str:
        """Returns the tenant that shares the engine with others. All requests without a key or a trusted proxy's header
        are one tenant."""
        return self.owner if self.owner.startswith(KNOWN) else ""

    @property
    def owner_name(self) -> str | None:
        """Returns the owner of everything that this request stores or finds: the API key or, without one, the tenant
        that a trusted proxy names; unnamed tenants are one owner. None: the server has neither keys nor such a proxy,
        and all requests share everything."""
        if self.payer is not None:
            return self.payer.name
        return (self.tenant or UNNAMED) if self.tenants else None

    def charge_to(self, account: Account) -> None:
        self.payer = account
        self.owner = owner_of_key(account.name)

    def check_allowed(self, model: str) -> None:
        """Raises if the request's key may not use the model."""
        if self.payer is not None and not self.payer.may_use(model):
            raise self.payer.forbidden("model", f"use {model!r}, only {', '.join(self.payer.models)}")

    def may_see(self, derived: DerivedModel | None) -> bool:
        """Returns whether a derived model exists for this request: for its owner, and for keys whose list of models
        names it. A model without an owner is everyone's."""
        if derived is None or self.owner_name is None or derived.key in ("", self.owner_name):
            return True
        return self.payer is not None and derived.name in self.payer.models
