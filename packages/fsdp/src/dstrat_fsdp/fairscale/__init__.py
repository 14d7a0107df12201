"""The strategies on FairScale 0.4.13, an extra of this distribution."""
