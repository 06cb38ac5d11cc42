"""How the results of a function depend on the rows of the batch, by its jaxpr."""

from meshpar.rows.analysis import RowAnalysis as RowAnalysis
