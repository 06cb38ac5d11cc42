"""Contracts: declared collectives of a step against the compiled program."""

from meshpar.contracts.collective import Collective as Collective
from meshpar.contracts.contract import Contract as Contract
from meshpar.contracts.declared import DeclaredCollective as DeclaredCollective
from meshpar.contracts.hlo import parse_hlo as parse_hlo
