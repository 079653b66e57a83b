"""One picture a file, drawn from a `CurationPlotData`."""
