"""How results are shown: a document of plain values for each kind, printed as a page, as text and as Markdown."""
