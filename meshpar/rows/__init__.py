"""Row analysis: how results of a function depend on the rows of the batch."""

from meshpar.rows.analysis import RowAnalysis as RowAnalysis
