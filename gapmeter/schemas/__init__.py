"""JSON Schemas of the files that a run, a search and the like leave; made by gapmeter.analysis.results.schema."""
